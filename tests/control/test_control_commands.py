"""Commands of a run over several hosts: status, logs and stop by folder or address, and the Slurm job."""

import json
import re
import subprocess
import threading
import time
from pathlib import Path

import pytest
from control_helpers import TOKEN, Service

from headway.base.errors import UsageError
from headway.cli import main
from headway.config.loader import load_settings
from headway.config.rl import RlSettings
from headway.config.shared import HttpWeights, ZmqRollouts
from headway.core.control import Member
from headway.launch.deployments.slurm import batch_script
from headway.launch.hosts import parse_roles, with_network_transports
from headway.launch.joining import join
from headway.launch.trainer_hosts import HOSTS_HERE, TrainerHosts, parse_hosts
from headway.transport.control.client import ControlClient
from headway.transport.control.folder import FolderControl
from headway.transport.control.tokens import read_token


@pytest.fixture
def token(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    file = tmp_path / "token"
    file.write_text(f"{TOKEN}\n")
    file.chmod(0o600)
    monkeypatch.setenv("HEADWAY_TOKEN_FILE", str(file))
    monkeypatch.delenv("HEADWAY_TOKEN", raising=False)
    return file


def test_status_logs_and_stop_work_from_anywhere(
    service: Service, token: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    service.client().beat(Member("gpu7", "engine", "host7", 1.0, "http://10.0.0.7:8000"))
    for name, text in {
        "host7.gpu7_001.log": "old\n",
        "host7.gpu7_002.log": "one\ntwo\n",
        "trainer_001.log": "t\n",
    }.items():
        (service.paths.logs / name).write_text(text)
    assert main.run(["status", service.url]) == 0
    shown = capsys.readouterr().out
    assert "run: running, step 0 of 7, version -1" in shown and "engine gpu7 on host7: heard 0 s ago" in shown
    assert main.run(["status", str(service.paths.root), "--json"]) == 0
    assert list(json.loads(capsys.readouterr().out)["engines"]) == ["gpu7"]
    for where in (service.url, str(service.paths.root)):
        assert main.run(["logs", where, "gpu", "-n", "1"]) == 0
        assert capsys.readouterr().out == "== host7.gpu7_002.log\ntwo\n"
    assert not FolderControl(service.paths).stop_asked()
    assert main.run(["stop", service.url]) == 0
    assert FolderControl(service.paths).stop_asked()


def test_logs_are_followed_until_the_run_has_ended(
    service: Service, token: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (service.paths.logs / "trainer_001.log").write_text("old\nhalf")
    following = threading.Thread(target=main.run, args=(["logs", service.url, "-n", "1", "-f"],))
    following.start()
    wait_for = time.monotonic() + 120
    shown = ""
    while "half" not in shown and time.monotonic() < wait_for:
        time.sleep(0.05)
        shown += capsys.readouterr().out
    with (service.paths.logs / "trainer_001.log").open("a") as log:
        log.write(" a line\nunfinished")
    (service.paths.logs / "host7.gpu7_001.log").write_text("one\ntwo\n")
    service.control.ended = True
    following.join(120)
    shown += capsys.readouterr().out
    assert not following.is_alive()
    assert shown.splitlines() == [
        "== trainer_001.log",
        "half",
        "host7.gpu7_001 | one",
        "host7.gpu7_001 | two",
        "trainer_001 |  a line",
    ]


def test_a_token_that_others_can_read_is_refused(token: Path) -> None:
    token.chmod(0o644)
    with pytest.raises(UsageError, match="chmod 600"):
        read_token(token)


def test_a_host_joins_with_the_runs_settings_and_a_folder_of_its_own(
    service: Service, token: Path, tmp_path: Path
) -> None:
    from headway.config.trainer import TrainSettings

    flags = ["--run.output_dir", str(tmp_path / "here"), "--seed", "5"]
    joined = join(service.url, "trainer", TrainSettings, flags, command="train")
    assert (joined.settings.max_steps, joined.settings.seed) == (7, 5)
    assert joined.paths.root.parent == tmp_path / "here" and joined.paths.root.name.startswith("run.")
    assert join(service.url, "trainer", TrainSettings, flags, command="train").paths == joined.paths
    (joined.paths.record).write_text('{"id": "another", "joined": "runs"}')
    with pytest.raises(UsageError, match="holds another run"):
        join(service.url, "trainer", TrainSettings, flags, command="train")


def slurm_settings(*flags: str) -> RlSettings:
    argv = ["--run.name", "big", "--deployment.type", "slurm", *flags]
    return load_settings(RlSettings, argv).settings


def test_the_job_of_a_run_is_valid_shell_with_its_settings_and_without_its_token(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HEADWAY_TOKEN", TOKEN)
    settings = slurm_settings(
        *("--deployment.inference.nodes", "3", "--deployment.partition", "gpu", "--deployment.time", "8:00:00"),
        *("--deployment.environment", '{NCCL_DEBUG = "it\'s on"}', "--deployment.inference.gpus", "8"),
    )
    script = batch_script(settings)
    checked = subprocess.run(["bash", "-n"], input=script, text=True, capture_output=True)
    assert checked.returncode == 0 and not checked.stderr
    assert TOKEN not in script
    for line in ("--nodes=5", "--partition=gpu", "--time=8:00:00", "--requeue", "--gpus-per-node=8"):
        assert f"#SBATCH {line}\n" in script
    assert "export NCCL_DEBUG='it'\"'\"'s on'" in script
    embedded = re.search(r"<<'(\w+)'\n(.*?)\n\1\n", script, re.S)
    assert embedded is not None
    (tmp_path / "rl.toml").write_text(embedded[2])
    assert load_settings(RlSettings, ["@", str(tmp_path / "rl.toml")]).settings == settings


def test_a_trainer_that_may_go_on_with_fewer_nodes_leaves_their_number_to_slurm() -> None:
    flags = ("--deployment.trainer.nodes", "4", "--placement.trainer_ranks", "4", "--deployment.inference.nodes", "2")
    script = batch_script(slurm_settings(*flags, "--deployment.trainer.fewest", "2"))
    assert "#SBATCH --nodes=5-7\n" in script and "--hosts 2:4 " in script
    assert "HEADWAY_TRAINER_NODES=$((${#nodes[@]} - 1 - 2))\n" in script
    assert "#SBATCH --nodes=7\n" in batch_script(slurm_settings(*flags))
    with pytest.raises(UsageError, match="must not be more than nodes"):
        slurm_settings(*flags, "--deployment.trainer.fewest", "5")


def test_hosts_wait_for_those_that_the_scheduler_has_started(monkeypatch: pytest.MonkeyPatch) -> None:
    def most(here: str | None) -> int:
        monkeypatch.delenv(HOSTS_HERE, raising=False)
        if here:
            monkeypatch.setenv(HOSTS_HERE, here)
        return TrainerHosts(ControlClient("http://127.0.0.1:1", TOKEN), parse_hosts("2:4"), 8, []).hosts.most

    assert [most(here) for here in (None, "4", "3", "1", "9")] == [4, 4, 3, 2, 4]


def test_a_job_that_cannot_be_is_refused(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UsageError, match=r"trainer_ranks is 1, but deployment.trainer has 2 nodes"):
        batch_script(slurm_settings("--deployment.trainer.nodes", "2"))
    with pytest.raises(UsageError, match="without quotes"):
        slurm_settings("--deployment.folder", "it's")
    assert main.run(["rl", "--run.name", "x", "--deployment.type", "slurm", "--dry-run"]) == 0
    assert capsys.readouterr().out.startswith("#!/bin/bash\n#SBATCH --job-name=headway-x\n")
    assert main.run(["rl", "--only", "trainer"]) == 2
    assert "--control.host" in capsys.readouterr().err
    with pytest.raises(UsageError, match="--only takes inference, orchestrator, trainer"):
        parse_roles("trainer,king")


def test_transports_cross_hosts_unless_the_user_chose_others() -> None:
    settings = load_settings(RlSettings, []).settings
    assert with_network_transports(settings, {}, None) == settings
    across = with_network_transports(settings, {}, "127.0.0.1")
    assert across.rollouts == ZmqRollouts(address="tcp://127.0.0.1:0") and across.weights == HttpWeights()
    assert with_network_transports(settings, {"rollouts.type": "", "weights.type": ""}, "127.0.0.1") == settings
    moved = with_network_transports(across, {"rollouts.type": "", "weights.type": ""}, "127.0.0.2")
    assert moved.rollouts == ZmqRollouts(address="tcp://127.0.0.2:0"), "a resumed run listens where it is now"
