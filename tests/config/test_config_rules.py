"""Settings that make no sense together are refused, and the refusal says what to change."""

from pathlib import Path

import pytest

from headway.base.errors import UsageError
from headway.config.commands import process_settings
from headway.config.host import HostSettings
from headway.config.loader import load_settings
from headway.config.orchestrator import OrchestrateSettings
from headway.config.rl import RlSettings
from headway.config.trainer import TrainSettings

TEACHER = "--orchestrator.algorithm.teacher.base_url"
ENVS = '[{id = "a"}, {id = "b", group_size = 1}]'

REFUSED = [
    (["--orchestrator.group_size=1"], '--orchestrator.group_size must be at least 2 for algorithm "grpo" (got 1)'),
    (
        ["--orchestrator.envs", ENVS],
        '--orchestrator.envs: orchestrator.envs.1.group_size must be at least 2 for algorithm "grpo" (got 1)',
    ),
    (["--model.lora.rank=4", "--model.vision_tower=lora"], '--model.vision_tower must be "frozen" or "trained" here'),
    (["--orchestrator.batch_size=24"], "--orchestrator.batch_size must be a multiple of group_size, which is 16"),
    (
        ["--orchestrator.algorithm.type=opd"],
        'orchestrator.algorithm.teacher is missing: algorithm "opd" needs a frozen',
    ),
    (
        ["--orchestrator.algorithm.type=sft"],
        'orchestrator.algorithm.teacher is missing: algorithm "sft" needs a frozen',
    ),
    (
        ["--orchestrator.algorithm.type=opd", f"{TEACHER}=http://localhost:8000"],
        f"{TEACHER} is the live policy's own server",
    ),
    (
        [
            "--orchestrator.algorithm.type=opd",
            f"{TEACHER}=http://gpu7:9/v1",
            '--orchestrator.engines=["http://gpu7:9"]',
        ],
        f"{TEACHER} is the live policy's own server",
    ),
    ([f"{TEACHER}=http://gpu7:9"], 'belongs to orchestrator.algorithm.type = "opd" or "sft"'),
    (["--orchestrator.envs", '[{id = "a"}, {id = "a"}]'], "orchestrator.envs.1.name must differ from the others'"),
    (["--orchestrator.eval.envs", '[{id = "a"}, {id = "b", name = "a"}]'], "orchestrator.eval.envs.1.name must differ"),
    (["--orchestrator.concurrency.max=4"], "orchestrator.concurrency.min must be at most max, which is 4 (got 8)"),
    (["--orchestrator.concurrency.kv_low=0.95"], "--orchestrator.concurrency.kv_low must be at most kv_high"),
    (["--orchestrator.sampling.max_tokens=4096"], "--orchestrator.sampling.max_tokens must be at most seq_len"),
    (
        ["--orchestrator.envs", '[{id = "a", workers = {min = 5}}]'],
        "orchestrator.envs.0.workers.min must be at most max, which is 4 (got 5)",
    ),
    (
        ["--orchestrator.envs", '[{id = "a", curriculum = {type = "difficulty", hard = 0.95}}]'],
        "orchestrator.envs.0.curriculum.hard must be below easy, which is 0.9 (got 0.95)",
    ),
    (
        ["--orchestrator.envs", '[{id = "a", curriculum = {type = "difficulty", hard_share = 0.95}}]'],
        "orchestrator.envs.0.curriculum.hard_share and easy_share must not add up to more than 1",
    ),
    (
        ["--trainer.parallel.replicate=2"],
        "--trainer.parallel.replicate must divide placement.trainer_ranks, which is 1 (got 2)",
    ),
    (
        ["--trainer.parallel.expert=4", "--trainer.parallel.replicate=2", "--placement.trainer_ranks=4"],
        "--trainer.parallel.expert must divide placement.trainer_ranks / trainer.parallel.replicate, which is 2",
    ),
    (
        ["--trainer.parallel.context=2"],
        "--trainer.parallel.context must divide placement.trainer_ranks / trainer.parallel.replicate, which is 1",
    ),
    (
        ["--placement.data_ranks=4", "--placement.trainer_ranks=4", "--trainer.parallel.context=2"],
        "--placement.data_ranks must be placement.trainer_ranks / trainer.parallel.context, which is 2 (got 4)",
    ),
    (["--trainer.activations.offload"], '--trainer.activations.offload needs checkpoint = "selective" or "full"'),
    (["--trainer.loss.type=icepop", "--trainer.loss.low=9"], "--trainer.loss.low must be at most high, which is 5.0"),
    (
        ["--trainer.schedule.type=linear", "--trainer.schedule.decay_steps=101"],
        "--trainer.schedule.decay_steps and warmup_steps add up to 101, more than max_steps, which is 100",
    ),
    (["--trainer.fake_data.mean_len=4096"], "--trainer.fake_data.mean_len must be at most seq_len, which is 2048"),
    (["--inference.max_running=4000"], "inference.max_batched_tokens must be at least max_running, which is 4000"),
    *(([f"--run.name={name}"], "--run.name is a folder's name") for name in ("", "../x", "a/b", ".a", "-a", "a" * 101)),
    (["--model.lora.targets=[]"], "--model.lora.targets"),
]


@pytest.mark.parametrize(("argv", "reason"), REFUSED, ids=[" ".join(argv)[:60] for argv, _ in REFUSED])
def test_nonsense_is_refused_with_the_setting_to_change(argv: list[str], reason: str) -> None:
    with pytest.raises(UsageError) as caught:
        load_settings(RlSettings, argv)
    assert reason in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "flag", ["--placement.trainer_ranks=2", "--trainer.optimizer_on_cpu=true", "--model.compute=fp8"]
)
def test_a_host_refuses_what_its_trainer_does_not_have(flag: str) -> None:
    """Before anything is started, and not when its trainer starts."""
    with pytest.raises(UsageError, match="a host's trainer is one process on one device") as caught:
        load_settings(HostSettings, [flag])
    assert str(caught.value).startswith(f"{flag.partition('=')[0]} must be left at its default")


def test_the_orchestrator_packs_for_the_ranks_that_read_different_data() -> None:
    argv = ["--placement.trainer_ranks=8", "--trainer.parallel.context=4", "--trainer.parallel.replicate=2"]
    parts = process_settings(load_settings(RlSettings, argv).settings)
    orchestrator, trainer = parts["orchestrator"], parts["trainer"]
    assert isinstance(orchestrator, OrchestrateSettings)
    assert isinstance(trainer, TrainSettings)
    assert orchestrator.placement.batch_parts == trainer.data_ranks == 2


@pytest.mark.parametrize(
    "argv",
    [
        ["--orchestrator.group_size=1", "--orchestrator.algorithm.type=rae"],
        ["--orchestrator.algorithm.type=opd", f"{TEACHER}=http://gpu7:9/v1", "--orchestrator.group_size=1"],
        ["--orchestrator.batch_size=32", "--orchestrator.group_size=8"],
        ["--orchestrator.max_lag=0"],
        ["--trainer.parallel.replicate=2", "--trainer.parallel.expert=2", "--placement.trainer_ranks=4"],
        ["--orchestrator.envs", '[{id = "a"}, {id = "a", name = "b"}]'],
    ],
)
def test_sense_is_accepted(argv: list[str]) -> None:
    load_settings(RlSettings, argv)


@pytest.mark.parametrize(
    ("flags", "name"),
    [
        (["--trainer.optim.lr", "inf"], "trainer.optim.lr"),
        (["--max_steps", "1" * 23], "max_steps"),
        (["--orchestrator.engines", '["ftp://x"]'], "orchestrator.engines"),
    ],
)
def test_values_that_no_run_can_use_are_refused(flags: list[str], name: str) -> None:
    with pytest.raises(UsageError, match=name):
        load_settings(RlSettings, flags)


def test_a_file_that_is_nested_too_deeply_is_refused(tmp_path: Path) -> None:
    (tmp_path / "deep.toml").write_text("a = " + "[" * 2000 + "]" * 2000)
    with pytest.raises(UsageError, match="nested"):
        load_settings(RlSettings, ["@", str(tmp_path / "deep.toml")])
