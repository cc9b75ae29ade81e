"""The built-ins: made once, always the same, and what they claim to be."""

import hashlib
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from headway.base.errors import UsageError
from headway.models.checkpoints.folders import load_model
from headway.models.registry import load_config
from headway.models.tiny import BUILT_IN, resolve_model, save_built_in

EXPECTED = [0.013506516, 0.0141905, 0.006063033, -0.032588568]


@pytest.fixture(autouse=True)
def _cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HEADWAY_CACHE", str(tmp_path / "cache"))


@pytest.mark.parametrize("name", BUILT_IN)
def test_a_built_in_is_a_small_checkpoint_with_a_tokenizer(name: str) -> None:
    folder = resolve_model(name)
    model = load_model(folder)
    parameters = sum(p.numel() for p in model.parameters())
    assert 400_000 < parameters < 600_000
    assert (folder / "tokenizer.json").is_file() and (folder / "tokenizer_config.json").is_file()
    assert model.config.vocab_size == model.head_weight().shape[0]
    assert len(model.config.eos_ids) == 2


def test_weights_come_from_the_seed_alone(tmp_path: Path) -> None:
    """The numbers themselves: another version of torch or numpy must not change them."""
    save_built_in("tiny", tmp_path / "tiny")
    digest = hashlib.sha256((tmp_path / "tiny" / "model.safetensors").read_bytes()).hexdigest()
    torch.manual_seed(1)
    save_built_in("tiny", tmp_path / "again")
    assert digest == hashlib.sha256((tmp_path / "again" / "model.safetensors").read_bytes()).hexdigest()
    weight = load_model(tmp_path / "tiny").head_weight()[0, :4].tolist()
    assert weight == pytest.approx(EXPECTED, abs=1e-7)


def test_a_folder_stays_and_a_built_in_is_made_once(tmp_path: Path) -> None:
    folder = resolve_model("tiny")
    made = (folder / "model.safetensors").stat().st_mtime_ns
    assert resolve_model("tiny") == folder
    assert (folder / "model.safetensors").stat().st_mtime_ns == made
    assert resolve_model(str(folder)) == folder


def test_processes_that_ask_at_once_get_one_model() -> None:
    ask = "from headway.models.tiny import resolve_model; print(resolve_model('tiny-llama'))"
    asking = [subprocess.Popen([sys.executable, "-c", ask], stdout=subprocess.PIPE, text=True) for _ in range(3)]
    folders = {process.communicate()[0].strip() for process in asking}
    assert len(folders) == 1
    assert load_config(Path(folders.pop())).family == "llama"


def test_a_name_that_is_nothing_is_refused_with_the_choices() -> None:
    with pytest.raises(UsageError, match="tiny, tiny-llama, tiny-moe"):
        resolve_model("tinny")


def test_the_examples_of_the_documentation_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("headway.models.ops.registry.OPS", {})  # an example registers an operation
    page = (Path(__file__).parents[2] / "docs" / "models.md").read_text()
    examples = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    code = "\n".join(example for example in examples if "cuda" not in example or "folder = resolve_model" in example)
    names: dict[str, Any] = {}
    exec(code.replace("/tmp", str(tmp_path)), names)
    assert names["logits"].shape == (8, names["model"].config.vocab_size)
    assert (tmp_path / "copy" / "tokenizer.json").is_file() and (tmp_path / "adapter").is_dir()


@pytest.mark.parametrize(
    ("module", "unwanted"),
    [
        ("headway.models.tiny", ["torch"]),
        (
            "headway.models.adapters.lora, headway.models.checkpoints.folders",
            ["torch._dynamo", "torch.distributed.tensor"],
        ),
    ],
)
def test_imports_that_take_seconds_are_left_until_needed(module: str, unwanted: list[str]) -> None:
    """The orchestrator resolves models without torch; an engine starts without torch's compiler."""
    check = f"import sys, {module}; sys.exit(any(name in sys.modules for name in {unwanted!r}))"
    assert subprocess.run([sys.executable, "-c", check], check=False).returncode == 0
