"""The probe that goes out with a version is what transformers computes with the weights that go out with it."""

from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from torch.distributed.tensor import DTensor
from trainer_helpers import rich_batch, run_paths, run_ranks, small_settings, vocab_of

from headway.core.protocol import WeightProbe
from headway.core.runs import RunPaths
from headway.models.checkpoints.folders import save_checkpoint
from headway.models.tiny import resolve_model
from headway.trainer.parallel.ranks import Ranks, joined
from headway.trainer.probe import PROBE_TOKENS, make_probe, probe_ids
from headway.trainer.publisher import Publisher
from headway.trainer.state import TrainState, build_state
from headway.trainer.step import Stepper
from headway.transport.announcements import latest
from headway.transport.rollouts import RankBatch

MODELS = ["tiny", "tiny-llama", "tiny-moe"]


def after_a_step(settings: Any, ranks: Ranks) -> TrainState:
    state = build_state(settings, ranks)
    batch = rich_batch(1, ranks.data_size, vocab_of(settings.model.path))
    Stepper(settings, ranks).step(state, RankBatch(1, batch.ranks[ranks.data_rank], batch.counts))
    return state


def of_transformers(folder: Path, probe: WeightProbe) -> tuple[list[float], list[float]]:
    """Logprobs, and the stream's root mean square at the last token, as transformers computes them."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    ids = torch.tensor(probe.token_ids)
    with torch.no_grad():
        output = model(ids[None], output_hidden_states=True)
    logprobs = torch.log_softmax(output.logits[0, :-1], -1).gather(1, ids[1:, None])[:, 0]
    # The last of transformers' hidden states is after the final norm; what went into that it does not tell.
    return logprobs.tolist(), [h[0, -1].square().mean().sqrt().item() for h in output.hidden_states]


@pytest.mark.parametrize("model", MODELS)
def test_the_probe_is_what_transformers_computes_with_the_new_weights(tmp_path: Path, model: str) -> None:
    settings = small_settings(model__path=model)
    with joined(settings) as ranks:
        state = after_a_step(settings, ranks)
        before = make_probe(build_state(settings, ranks), settings.seq_len)
        probe = make_probe(state, settings.seq_len)
        save_checkpoint(state.model, tmp_path / "hf", files_from=resolve_model(model))
    assert probe is not None and before is not None
    assert probe.token_ids == before.token_ids and probe.logprobs != before.logprobs
    assert probe.dtype == "float32" and len(probe.logprobs) == len(probe.token_ids) - 1 == PROBE_TOKENS - 1
    logprobs, stream = of_transformers(tmp_path / "hf", probe)
    assert probe.logprobs == pytest.approx(logprobs, abs=1e-5)
    assert [*probe.stream[:-2], probe.stream[-1]] == pytest.approx(stream, rel=1e-5)


def test_probing_changes_nothing() -> None:
    settings = small_settings()
    with joined(settings) as ranks:
        plain, probed = after_a_step(settings, ranks), after_a_step(settings, ranks)
        make_probe(probed, settings.seq_len)
        batch = rich_batch(2, 1, vocab_of("tiny"))
        for state in (plain, probed):
            Stepper(settings, ranks).step(state, RankBatch(2, batch.ranks[0], batch.counts))
        assert probed.policy.training
        for (name, a), (_, b) in zip(plain.trained(), probed.trained(), strict=True):
            assert torch.equal(a, b), name


def sharded_probe(dtype: str) -> tuple[WeightProbe | None, list[bool]]:
    """A rank's probe, and which of its parameters are still shards after it."""
    settings = small_settings(placement__trainer_ranks=2, model__dtype=dtype)
    with joined(settings) as ranks:
        state = after_a_step(settings, ranks)
        probe = make_probe(state, settings.seq_len)
        return probe, [isinstance(parameter, DTensor) for parameter in state.policy.parameters()]


@pytest.mark.parametrize(("dtype", "tolerance"), [("float32", 1e-5), ("bfloat16", 0.05)])
def test_ranks_that_share_the_weights_make_the_probe_together(dtype: str, tolerance: float) -> None:
    settings = small_settings()
    with joined(settings) as ranks:
        alone = make_probe(after_a_step(settings, ranks), settings.seq_len)
    (first, sharded), (second, _) = run_ranks(2, sharded_probe, dtype)
    assert alone is not None and first is not None and second is not None
    assert msgspec.structs.asdict(first) == msgspec.structs.asdict(second)
    assert first.dtype == dtype
    assert first.logprobs == pytest.approx(alone.logprobs, abs=tolerance)
    assert all(sharded), "weights must not stay gathered after a pass without a backward one"


def published(folder: Path, **changes: Any) -> WeightProbe | None:
    settings = small_settings(**changes)
    paths: RunPaths = run_paths(folder)
    with joined(settings) as ranks:
        publisher = Publisher(settings, paths)
        publisher.publish(build_state(settings, ranks))
        publisher.close()
    update = latest(paths)
    assert update is not None
    return update.probe


@pytest.mark.parametrize("transport", ["filesystem", "shared_memory", "point_to_point"])
def test_every_transport_announces_the_probe(tmp_path: Path, transport: str) -> None:
    settings = small_settings()
    with joined(settings) as ranks:
        expected = make_probe(build_state(settings, ranks), settings.seq_len)
    assert published(tmp_path, weights={"type": transport}) == expected


def test_an_adapter_goes_out_without_a_probe_and_so_does_a_run_that_wants_none(tmp_path: Path) -> None:
    assert published(tmp_path / "lora", model__lora={"rank": 2, "alpha": 4}) is None
    assert published(tmp_path / "off", trainer__probe=False) is None


def test_weights_that_are_not_finite_are_no_yardstick() -> None:
    settings = small_settings()
    with joined(settings) as ranks:
        state = build_state(settings, ranks)
        with torch.no_grad():
            state.model.head_weight()[0, 0] = torch.nan
        assert make_probe(state, settings.seq_len) is None


def test_probes_fit_into_short_contexts() -> None:
    assert len(probe_ids(100, 7)) == 7
    assert probe_ids(100, 7).tolist() == probe_ids(100, 24).tolist()[:7]
