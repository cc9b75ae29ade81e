"""Agent programs in a sandbox: their model answers, and nothing else is within reach."""

import asyncio
import io
import socket
import stat
import tarfile
from pathlib import Path
from typing import Any

import pytest
from sandbox_kinds import needs_bubblewrap

from headway.envs.agents.agent import AgentProgram, _unpack
from headway.envs.policy import EpisodeFailure, ScriptedPolicy
from headway.sandboxes.sandbox import Snapshot

pytestmark = needs_bubblewrap

AGENT = """
import json, os, socket, sys, urllib.request
body = json.dumps({"messages": [{"role": "user", "content": json.loads(os.environ["HEADWAY_TASK"])["word"]}]}).encode()
url = os.environ["OPENAI_BASE_URL"] + "/chat/completions"
reply = json.load(urllib.request.urlopen(urllib.request.Request(url, body, {"Content-Type": "application/json"})))
print(reply["choices"][0]["message"]["content"])
scratch = os.environ["HEADWAY_SCRATCH"]
open(scratch + "/seen", "w").write(json.dumps({
    "variables": dict(os.environ), "home": os.path.exists(sys.argv[2]), "python": sys.version}))
os.symlink("/etc/shadow", scratch + "/link")
try: socket.create_connection(("127.0.0.1", int(sys.argv[3])), 2); print("CONNECTED")
except OSError: pass
"""
JUDGE = """
import json
def judge(task, run):
    global last
    seen, files = (run.scratch / "seen").read_text(), sorted(path.name for path in run.scratch.iterdir())
    last = run.stdout, run.exit_code, json.loads(seen), files
    return 1.0
"""


def agent(tmp_path: Path, port: int, text: str = AGENT, **more: Any) -> AgentProgram:
    (tmp_path / "agent").mkdir(exist_ok=True)
    (tmp_path / "agent" / "agent.py").write_text(text)
    (tmp_path / "judge.py").write_text(JUDGE)
    return AgentProgram(
        command=["{python}", "agent.py", "{word}", str(tmp_path / "judge.py"), str(port)],
        tasks=[{"word": "abc", "id": "first"}],
        reward=f"{tmp_path / 'judge.py'}:judge",
        cwd=str(tmp_path / "agent"),
        **more,
    )


async def play(environment: AgentProgram) -> ScriptedPolicy:
    policy = ScriptedPolicy(lambda _agent, _messages: "cba")
    try:
        await environment.run(environment.tasks()[0], policy)
    finally:
        await environment.close()
    return policy


@pytest.mark.parametrize("sandbox", ["bubblewrap", None])
def test_an_agent_reaches_its_model_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, sandbox: str | None) -> None:
    monkeypatch.setenv("MY_SECRET", "hunter2")
    with socket.create_server(("127.0.0.1", 0)) as other:
        environment = agent(tmp_path, other.getsockname()[1], sandbox=sandbox, env={"GIVEN": "yes"})
        policy = asyncio.run(play(environment))
    out, code, seen, files = environment._reward.__globals__["last"]
    assert out == ("cba\n" if sandbox else "cba\nCONNECTED\n") and code == 0
    assert seen["home"] == (sandbox is None)
    assert seen["variables"]["GIVEN"] == "yes" and "hunter2" not in seen["variables"].values()
    assert files == (["seen"] if sandbox else ["link", "seen"])
    assert policy.trace.reward == 1.0
    assert policy.trace.metrics.get("sandbox_starts") == (1.0 if sandbox else None)


def test_an_agent_that_takes_too_long_is_a_timeout(tmp_path: Path) -> None:
    environment = agent(tmp_path, 1, "import time; time.sleep(1000)", sandbox="bubblewrap", timeout=1.0)
    with pytest.raises(EpisodeFailure, match="longer than 1 s"):
        asyncio.run(play(environment))


def test_what_an_agent_leaves_is_written_into_its_folder_only(tmp_path: Path) -> None:
    entries = {"./kept/run.sh": 0o4775, "../outside": 0o644, "/outside": 0o644, "kept/../../outside": 0o644}
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w") as archive:
        for name, mode in entries.items():
            entry = tarfile.TarInfo(name)
            entry.size, entry.mode = 2, mode
            archive.addfile(entry, io.BytesIO(b"hi"))
        for kind in (tarfile.SYMTYPE, tarfile.LNKTYPE, tarfile.FIFOTYPE):
            entry = tarfile.TarInfo(f"special{kind!r}")
            entry.type, entry.linkname = kind, "/etc/passwd"
            archive.addfile(entry)
    (tmp_path / "scratch").mkdir()
    _unpack(Snapshot(packed.getvalue()), str(tmp_path / "scratch"))
    files = [path for path in tmp_path.rglob("*") if not path.is_dir()]
    assert files == [tmp_path / "scratch" / "kept" / "run.sh"] and files[0].read_text() == "hi"
    assert stat.S_IMODE(files[0].stat().st_mode) == 0o755
