"""The way of a new user, by the README and the guides: an environment, a model and an algorithm of one's own, then the
export, a server and an evaluation; the run is looked at and continued from another folder."""

import json
import re
import shutil
import urllib.request
from pathlib import Path

import pytest
from e2e_runs import EXAMPLES, Run, headway, serving

from headway.core.runs import RunPaths
from headway.models.tiny import resolve_model

ROOT = EXAMPLES.parent


def write_blocks(page: Path, folder: Path) -> None:
    """Write the Python files that a page shows, under the names it gives them."""
    for block in re.findall(r"```python\n(# \w+\.py\n.*?)```", page.read_text(), re.DOTALL):
        name = block.partition("\n")[0].removeprefix("# ")
        (folder / name).write_text(block)


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_the_first_day_of_a_user(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    work, elsewhere = tmp_path / "work", tmp_path / "elsewhere"
    elsewhere.mkdir()
    work.mkdir()
    monkeypatch.chdir(work)
    for page in (ROOT / "README.md", ROOT / "docs" / "bring_your_own.md"):
        write_blocks(page, work)
    shutil.copytree(resolve_model("tiny"), work / "my-model")

    assert "shout.py:Shout" in headway("env", "show", "shout.py:Shout")
    mine = [
        *("@", str(EXAMPLES / "base.toml"), "--model.path", "my-model", "--run.name", "first"),
        *("--orchestrator.envs", '[{id = "shout.py:Shout"}]', "--orchestrator.batch_size", "32"),
        *("--orchestrator.algorithm", '{type = "custom", path = "my_algorithm.py:Centered", args = {decay = 0.95}}'),
    ]
    assert "checked: environment shout.py:Shout: 2 tasks" in headway("rl", *mine, "--dry-run")
    headway("rl", *mine, "--max_steps", "3")
    root = work / "outputs" / "first"
    assert "Say " in headway("rollouts", "show", str(root), "-n", "1")

    monkeypatch.chdir(elsewhere)
    headway("rl", "--resume", str(root), "--max_steps", "5")
    run = Run(RunPaths(root))
    assert [line["step"] for line in run.metrics("trainer")] == [1, 2, 3, 4, 5]

    headway("export", f"{root}@5", "trained")
    with serving("trained") as url:
        body = json.dumps({"messages": [{"role": "user", "content": "Say hello loudly."}], "max_tokens": 4}).encode()
        request = urllib.request.Request(f"{url}/v1/chat/completions", body, {"Content-Type": "application/json"})
        assert json.load(urllib.request.urlopen(request, timeout=60))["choices"][0]["finish_reason"]
        scores = headway("eval", "--url", url, "--env", f"{work}/shout.py:Shout", "--max-tokens", "8", "--json")
    assert 'shout.py:Shout/avg": ' in scores
