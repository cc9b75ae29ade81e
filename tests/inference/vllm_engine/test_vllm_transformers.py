"""vLLM serves what Hugging Face's module trains: same names, same logprobs after an update."""

import json
from pathlib import Path

import pytest
from engine_common import publish, training_logprobs
from vllm_families import FAMILIES, SIZES, TOKENS, make_model
from vllm_harness import Harness

from headway.models.registry import find_family

pytestmark = [pytest.mark.vllm, pytest.mark.slow, pytest.mark.timeout(900)]


def test_logprobs_after_an_update_are_the_trainers(tmp_path: Path) -> None:
    values = json.loads((FAMILIES / "transformers" / "phi3.json").read_text())
    config = find_family("transformers").config_from_hf({**values, **SIZES, "sliding_window": None})
    trained = make_model(config, 1)
    harness = Harness(config, tmp_path / "model", build=make_model)
    try:
        harness.run(harness.engine.update(publish(tmp_path / "update", 1, trained)))
        difference = (harness.served(TOKENS) - training_logprobs(trained, TOKENS)).abs().max()
    finally:
        harness.close()
    assert float(difference) < 1e-4
