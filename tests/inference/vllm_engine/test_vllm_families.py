"""Families in vLLM: what it serves after an update is what we compute.

These are the most different ones; `docs/measurements/vllm_families.json` holds what all others came to.
"""

from pathlib import Path

import pytest
from vllm_families import difference
from vllm_here import TOLERANCE

pytestmark = [pytest.mark.vllm, pytest.mark.slow, pytest.mark.timeout(900)]


@pytest.mark.parametrize("case", ["glm4_moe/plain", "gemma3_text/plain", "olmo3/yarn"])
def test_logprobs_after_an_update_are_ours(case: str, tmp_path: Path) -> None:
    assert difference(case, tmp_path) < TOLERANCE
