"""Models and data sets by their ids, from a local stand-in of the hub that the real client talks to."""

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from hub_server import TOKEN, Hub

from headway.base.errors import HeadwayError, UsageError
from headway.base.hub import MODEL_FILES, HubId, parse_hub_id, pinned, push
from headway.core.rows import read_rows
from headway.models.tiny import resolve_model
from headway.rendering.load import load_renderer

constants = pytest.importorskip("huggingface_hub.constants", reason="needs the extra hub")


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    served = Hub()
    monkeypatch.setenv("HF_ENDPOINT", served.url)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(constants, "HF_HUB_DISABLE_XET", True)
    monkeypatch.setattr(constants, "HF_TOKEN_PATH", str(tmp_path / "no_token"))
    monkeypatch.delenv("HF_TOKEN", raising=False)
    yield served
    served.close()


@pytest.fixture(scope="module")
def checkpoint() -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in resolve_model("tiny").iterdir()}


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("Qwen/Qwen3-0.6B", HubId("Qwen/Qwen3-0.6B")),
        ("a/b@v1.0", HubId("a/b", "", "v1.0")),
        ("openai/gsm8k/main@abc", HubId("openai/gsm8k", "main", "abc")),
        ("tiny", None),
        ("/a/b", None),
        ("./a/b", None),
        ("~/a", None),
        ("a//b", None),
        ("../a", None),
    ],
)
def test_ids_are_told_from_paths(text: str, expected: HubId | None) -> None:
    assert parse_hub_id(text) == expected
    assert expected is None or str(expected) == text


def test_a_path_into_a_folder_that_is_here_is_no_id(hub: Hub, tmp_path: Path) -> None:
    (tmp_path / "outputs").mkdir()
    with pytest.raises(UsageError, match="neither a folder"):
        resolve_model("outputs/my-run")
    assert hub.asked == []


def test_a_model_is_downloaded_once_without_code_or_copies(hub: Hub, checkpoint: dict[str, bytes]) -> None:
    others = {"model.py": b"boom", "pytorch_model.bin": b"x", "original/model.safetensors": b"x", "notes.md": b"x"}
    sha = hub.add("model", "someone/small", {**checkpoint, **others})
    folder = resolve_model("someone/small", weights=False)
    assert folder.name == sha and not list(folder.glob("*.safetensors"))
    assert load_renderer(folder).encode("abc")
    assert {file.name for file in resolve_model("someone/small").rglob("*")} == set(checkpoint)
    hub.asked.clear()
    assert resolve_model(f"someone/small@{sha}") == folder
    assert hub.asked == []  # a commit never changes, so nobody is asked


def test_an_id_is_pinned_to_the_commit_that_it_means_now(hub: Hub, checkpoint: dict[str, bytes]) -> None:
    first = hub.add("model", "someone/small", checkpoint)
    hub.repositories["model", "someone/small"].refs["v1"] = first
    second = hub.add("model", "someone/small", {"config.json": checkpoint["config.json"] + b"\n"})
    assert pinned("someone/small", "model", MODEL_FILES) == f"someone/small@{second}"
    assert pinned("someone/small@v1", "model", MODEL_FILES) == f"someone/small@{first}"
    assert pinned("tiny", "model", MODEL_FILES) == "tiny"


def test_what_is_missing_is_said(hub: Hub, checkpoint: dict[str, bytes]) -> None:
    hub.add("model", "someone/small", checkpoint)
    hub.add("model", "someone/secret", checkpoint, private=True)
    for name, reason in [
        ("someone/nothing", "neither a folder here nor a model on the hub"),
        ("someone/secret", "private one needs `hf auth login`"),
        ("someone/small@nowhere", "no revision 'nowhere'"),
    ]:
        with pytest.raises(UsageError, match=reason):
            resolve_model(name)


def test_offline_only_what_is_cached(hub: Hub, checkpoint: dict[str, bytes], monkeypatch: pytest.MonkeyPatch) -> None:
    sha = hub.add("model", "someone/small", checkpoint)
    resolve_model("someone/small", weights=False)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    assert resolve_model("someone/small", weights=False).name == sha
    for name in ("someone/small", "someone/other"):  # one lacks its weights, the other everything
        with pytest.raises(UsageError, match="HF_HUB_OFFLINE forbids downloads"):
            resolve_model(name)


def test_a_hub_that_is_down(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:1")
    with pytest.raises(HeadwayError, match="does not answer"):
        resolve_model("someone/small")


def test_without_the_client_the_message_says_what_to_install(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    with pytest.raises(UsageError, match="pip install 'huggingface_hub<"):
        resolve_model("someone/small")


def test_an_adapter_is_its_model_with_it_merged_in(
    hub: Hub, tmp_path: Path, checkpoint: dict[str, bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    import torch
    from safetensors.torch import load, load_file, save

    monkeypatch.setenv("HEADWAY_CACHE", str(tmp_path / "made"))
    name = "model.layers.0.self_attn.q_proj"
    weight = load(checkpoint["model.safetensors"])[f"{name}.weight"]
    a, b = torch.randn(4, weight.shape[1]), torch.randn(weight.shape[0], 4)
    prefix = f"base_model.model.{name}"
    config = {"peft_type": "LORA", "base_model_name_or_path": "someone/small", "r": 4, "lora_alpha": 8}
    hub.add("model", "someone/small", checkpoint)
    files = {
        "adapter_config.json": json.dumps({**config, "target_modules": ["q_proj"]}).encode(),
        "adapter_model.safetensors": save({f"{prefix}.lora_A.weight": a, f"{prefix}.lora_B.weight": b}),
    }
    hub.add("model", "someone/adapter", files)
    merged = load_file(resolve_model("someone/adapter") / "model.safetensors")
    torch.testing.assert_close(merged[f"{name}.weight"], weight + 2 * b @ a)
    assert resolve_model("someone/adapter", weights=False).parts[-3] == "models--someone--small"
    hub.add("model", "someone/broken", {"adapter_config.json": b"{}"})
    with pytest.raises(UsageError, match="does not say which model"):
        resolve_model("someone/broken")


def test_rows_of_a_data_set(hub: Hub) -> None:
    def lines(*numbers: int) -> bytes:
        return "".join(json.dumps({"n": number}) + "\n" for number in numbers).encode()

    hub.add(
        "dataset", "some/rows", {"main/train-1.jsonl": lines(1, 2), "main/test-1.jsonl": lines(3), "b/x.jsonl": b""}
    )
    assert [row.data["n"] for row in read_rows("some/rows/main", "train")] == [1, 2]
    assert [row.data["n"] for row in read_rows("some/rows", "test")] == [3]
    with pytest.raises(UsageError, match="neither a folder here nor a dataset"):
        read_rows("some/nothing")


def test_push_makes_the_model_and_uploads_large_files_by_lfs(
    hub: Hub, tmp_path: Path, checkpoint: dict[str, bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "export"
    folder.mkdir()
    for name, content in checkpoint.items():
        (folder / name).write_bytes(content)
    with pytest.raises(UsageError, match="refuses the token"):
        push(folder, "me/mine", private=True)
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    for _ in range(2):  # the second one adds a commit
        assert push(folder, "me/mine", private=True).startswith(f"{hub.url}/me/mine/commit/")
    repository = hub.repositories["model", "me/mine"]
    assert repository.private and repository.commits[repository.refs["main"]] == checkpoint
    assert "PUT /upload" in hub.asked
    with pytest.raises(UsageError, match="owner/name"):
        push(folder, "mine", private=False)


@pytest.mark.slow
def test_a_run_from_ids_records_their_commits_and_is_pushed(
    hub: Hub, tmp_path: Path, checkpoint: dict[str, bytes]
) -> None:
    """`headway sft` and `headway export --push` as a user types them."""
    model = hub.add("model", "someone/small", checkpoint)
    row = {"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]}
    data = hub.add("dataset", "some/chats", {"train.jsonl": (json.dumps(row) + "\n").encode() * 8})

    def headway(*arguments: str) -> str:
        variables = {"HF_ENDPOINT": hub.url, "HF_HOME": str(tmp_path / "home"), "HF_HUB_DISABLE_XET": "1"}
        return subprocess.run(
            [sys.executable, "-m", "headway.cli.main", *arguments],
            env={**os.environ, "OMP_NUM_THREADS": "1", **variables, "HF_TOKEN": TOKEN},
            check=True, capture_output=True, text=True,
        ).stdout  # fmt: skip

    place = ("--run.output_dir", str(tmp_path), "--run.name", "run")
    headway("sft", "--model.path", "someone/small", "--data.path", "some/chats", "--max_steps", "1", *place)
    settings = (tmp_path / "run" / "config" / "sft.toml").read_text()
    assert f'"someone/small@{model}"' in settings and f'"some/chats@{data}"' in settings
    assert TOKEN not in settings
    printed = headway("export", str(tmp_path / "run"), "--push", "me/mine")
    assert re.search(r"/me/mine/commit/\w+", printed)
    files = hub.repositories["model", "me/mine"]
    assert set(files.commits[files.refs["main"]]) >= {"config.json", "tokenizer.json", "model.safetensors"}
