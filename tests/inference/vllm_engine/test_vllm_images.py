"""Models that see in vLLM, through our server: logprobs are the trainer's, also after new weights of the tower."""

import json
import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
from vllm_here import ON_GPU, TOLERANCE

from headway.inference.vllm.images import ImageInputs
from headway.inference.vllm.load import _images

HERE = Path(__file__).parent
TORCHVISION = os.environ.get("HEADWAY_TORCHVISION")
FAMILIES = ["qwen2_5_vl", "qwen3_vl", "qwen3_vl_moe"] + ["gemma3"] * ON_GPU


@pytest.mark.vllm
@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.skipif(
    TORCHVISION is None and find_spec("torchvision") is None,
    reason="vLLM's models that see import torchvision, which has no build for this torch: HEADWAY_TORCHVISION names a "
    "folder made by `pip install --no-deps --target FOLDER torchvision==0.28.0`",
)
def test_logprobs_to_images_are_ours_before_and_after_updates(tmp_path: Path) -> None:
    """In a process of its own, so that others here do not find a torchvision that can't do much."""
    paths = [*sys.path, HERE, HERE.parents[1] / "rendering"]
    if TORCHVISION is not None:
        paths = [HERE / "torchvision_site", TORCHVISION, *paths]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(str(path) for path in paths if path)}
    command = [sys.executable, str(HERE / "vllm_images.py"), str(tmp_path), *FAMILIES]
    ended = subprocess.run(command, env=environment, stdout=subprocess.PIPE, check=True)
    found = [json.loads(line) for line in ended.stdout.splitlines() if line.startswith(b"{")]
    for family, (name, differences) in zip(FAMILIES, (next(iter(line.items())) for line in found), strict=True):
        assert family == name and len(differences) == 8, differences
        assert max(differences.values()) < TOLERANCE, (family, differences)


def test_images_are_refused_where_vllm_would_compute_something_else(tmp_path: Path) -> None:
    """Its attention on CPUs has no tokens that see later ones."""
    write_config(tmp_path, "gemma3")
    assert "use --engine embedded" in str(_images(tmp_path, 64, torch.float32, "cpu"))
    assert isinstance(_images(tmp_path, 64, torch.float32, "cuda"), ImageInputs)
    assert _images(tmp_path, 0, torch.float32, "cuda") == "this model does not see"
    (tmp_path / "config.json").write_text('{"model_type": "other"}')
    assert "Headway does not know this model" in str(_images(tmp_path, 64, torch.float32, "cuda"))


def write_config(folder: Path, name: str) -> None:
    hf = json.loads((HERE.parents[1] / "models" / "families" / name / "images.json").read_text())
    del hf["images"]
    (folder / "config.json").write_text(json.dumps(hf))
    processor = {"image_processor_type": "Gemma3ImageProcessor", "size": {"height": 16, "width": 16}}
    (folder / "preprocessor_config.json").write_text(json.dumps(processor))
