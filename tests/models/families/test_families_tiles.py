"""The runner of accelerators, whose kernels read blocks in place, on a CPU: with the operations' plain references."""

from pathlib import Path

import pytest
from engine_case import EngineCase, mismatch
from family_case import FamilyCase

from headway.inference.embedded.running.device_runner import DeviceRunner
from headway.inference.embedded.running.runners import in_tiles
from headway.models.ops import registry

NAMES = [
    "qwen3/plain",
    "mistral/window",
    "gemma3_text/plain",
    "olmo3/yarn",
    "gpt_oss/plain",
    "afmoe/plain",
    "laguna/layered",
    "qwen3_5_text/plain",
    "qwen3_next/plain",
    "nemotron_h/experts",
]


@pytest.mark.parametrize("name", NAMES)
def test_it_computes_what_the_trainer_computes(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Prompts in chunks beside decoding, past every window; preempted sequences; prefixes from the cache."""
    with monkeypatch.context() as patched:
        patched.setattr(registry, "in_triton", lambda weight: True)
        served = EngineCase(FamilyCase(name, tmp_path))
    assert isinstance(served.engine.runner, DeviceRunner)
    prompts = [served.prompt(n) for n in (1, 4, 19, 33, 45, 26)]
    results = served.generate(prompts, 24)
    assert served.engine.scheduler.preemptions > 0
    assert mismatch(served.model, prompts, results) < 1e-4
    prompts = [[*prompts[-1][:-1], token] for token in range(3)]
    results = served.generate(prompts, 6)
    assert results[-1].cached_tokens > 0
    assert mismatch(served.model, prompts, results) < 1e-4


def test_images_whose_tokens_see_each_other_are_not_for_tiles(tmp_path: Path) -> None:
    assert not in_tiles(FamilyCase("gemma3/images", tmp_path).model)
