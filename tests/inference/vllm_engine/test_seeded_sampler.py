"""Seeded draws inside vLLM: the tokens of the embedded engine, wherever vLLM moves a request in its batch."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from vllm_harness import TIED, make

from headway.config.inference import InferenceSettings, ServeSettings
from headway.core.draws import uniform
from headway.core.openai.requests import RequestError
from headway.core.protocol import GenerateRequest, SamplingParams
from headway.inference.vllm.arguments import SEEDED_SAMPLER, arguments
from headway.inference.vllm.requests import check_drawn
from headway.models import ops
from headway.models.checkpoints.folders import save_checkpoint

VOCAB = 300
Requests = dict[int, tuple[int, int]]
"""The seeds of a batch's rows, and where their next tokens stand."""


def change(sampler: Any, *, removed: Any = (), added: Any = (), moved: Any = ()) -> None:
    from vllm.v1.sample.logits_processor import BatchUpdate

    sampler.update_state(BatchUpdate(batch_size=4, removed=removed, added=added, moved=moved))


def check_rows(sampler: Any, seeded: Requests) -> None:
    """Check that seeded rows are left with the token and logprob of the embedded engine, and others with all."""
    logits = 3 * torch.randn(4, VOCAB, generator=torch.Generator().manual_seed(len(seeded)))
    got = sampler.apply(logits.clone())
    for row in range(4):
        if row not in seeded:
            assert torch.allclose(got[row], logits[row].log_softmax(-1))
            continue
        seed, position = seeded[row]
        noise = torch.from_numpy(uniform(np.array([seed], dtype=np.uint64), np.array([position])))
        (token,), (logprob,) = (of.tolist() for of in ops.draw_tokens(logits[row : row + 1], None, noise))
        assert got[row].isfinite().nonzero().flatten().tolist() == [token]
        assert got[row, token].item() == pytest.approx(logprob, abs=1e-6)


@pytest.mark.vllm
def test_seeds_and_positions_follow_requests_through_the_batch() -> None:
    import vllm
    from vllm.v1.sample.logits_processor import MoveDirectionality

    from headway.inference.vllm.draws import SeededSampler

    sampler = SeededSampler(None, torch.device("cpu"), False)
    outputs: list[list[int]] = [[], [], [5, 5]]
    seeds = (11, None, 2**62 - 1)
    requests = [(row, vllm.SamplingParams(seed=seeds[row]), [1] * (row + 3), outputs[row]) for row in range(3)]
    change(sampler, added=requests)
    check_rows(sampler, {0: (11, 3), 2: (2**62 - 1, 7)})
    outputs[0] += [7, 8]
    sampler.update_state(None)
    check_rows(sampler, {0: (11, 5), 2: (2**62 - 1, 7)})
    change(sampler, moved=[(0, 1, MoveDirectionality.SWAP), (2, 0, MoveDirectionality.UNIDIRECTIONAL)])
    check_rows(sampler, {1: (11, 5), 0: (2**62 - 1, 7)})
    change(sampler, removed=[1], added=[(0, vllm.SamplingParams(seed=4), [1], [])])
    check_rows(sampler, {0: (4, 1)})


def test_engines_that_draw_by_seeds_return_what_the_processor_made_of_logits(tmp_path: Path) -> None:
    save_checkpoint(make(TIED, 0), tmp_path / "model")
    for processors, mode in (([SEEDED_SAMPLER], "processed_logits"), ([], "processed_logprobs")):
        settings = ServeSettings(inference=InferenceSettings(vllm={"logits_processors": processors}))
        assert arguments(settings, tmp_path / "model", "cpu", memory=10**9)["logprobs_mode"] == mode


def test_such_engines_refuse_what_would_have_wrong_logprobs() -> None:
    check_drawn(GenerateRequest([1], sampling_params=SamplingParams(temperature=0.5, seed=1)))
    for wrong in ({"temperature": 0.0}, {"top_p": 0.9}, {"top_k": 4}, {"min_p": 0.1}, {"n": 2}, {"logprobs": 3}):
        with pytest.raises(RequestError, match="draws by seeds"):
            check_drawn(GenerateRequest([1], sampling_params=SamplingParams(seed=1, **wrong)))  # type: ignore[arg-type]
