"""The trainer's logprobs of sampled tokens, as it leaves them for people to compare with the engines'."""

from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from trainer_helpers import rich_batch, rich_micro_batch, run_paths, small_settings, spool, vocab_of

from headway.core.records import TrainedLogprobs
from headway.core.wire import decode
from headway.models.attention import PackedPlan
from headway.models.checkpoints.folders import load_model
from headway.models.packed import PackedTokens
from headway.models.tiny import resolve_model
from headway.trainer.logprobs import choose, sampled_tokens, spans
from headway.trainer.rl import train


@given(st.sets(st.integers(0, 60), min_size=1))
def test_spans_cover_exactly_what_they_are_made_of(numbers: set[int]) -> None:
    made = spans(np.array(sorted(numbers)))
    assert [at for start, length in made for at in range(start, start + length)] == sorted(numbers)
    assert all(a[0] + a[1] < b[0] for a, b in pairwise(made)), "unbroken runs are one span"


@given(st.integers(0, 120))
def test_whole_samples_are_chosen_up_to_the_bound(most: int) -> None:
    samples = sampled_tokens([rich_micro_batch([9, 17, 4], 300, seed=1), rich_micro_batch([24, 5], 300, seed=2)])
    chosen = choose(samples, most)
    left = {sample.key for sample in samples} - {sample.key for sample in chosen}
    taken = sum(len(sample.tokens) for sample in chosen)
    assert taken <= most
    assert all(len(sample.tokens) > most - taken for sample in samples if sample.key in left), "nothing more would fit"


def test_a_step_leaves_the_logprobs_of_the_weights_it_began_with(tmp_path: Path) -> None:
    paths = run_paths(tmp_path)
    spool(paths, range(1, 2))
    train(small_settings(max_steps=1, trainer__optim__lr=1e-3), paths)
    kept = decode(TrainedLogprobs, paths.trained_logprobs(1, 0).read_bytes())
    found = {sample.key: sample for sample in kept.samples}
    model = load_model(resolve_model("tiny"))
    compared = 0
    for micro in rich_batch(1, 1, vocab_of("tiny")).ranks[0]:
        for key, start, length in zip(micro.keys, np.cumsum([0, *micro.lengths[:-1]]), micro.lengths, strict=True):
            here = slice(start, start + length)
            sample = found[key]
            places = [at for first, count in sample.spans for at in range(first, first + count)]
            assert places == [at for at in range(1, length) if micro.sampled[here][at]]
            ids = torch.tensor(micro.token_ids[here], dtype=torch.long)
            with torch.no_grad():
                hidden = model(PackedTokens(ids, torch.arange(length), PackedPlan([length]))).hidden_TD
                logits = model.logits(hidden) / float(micro.temperatures[start])
            want = torch.log_softmax(logits, -1)[[at - 1 for at in places], ids[places]]
            np.testing.assert_allclose(sample.logprobs, want.numpy(), atol=2e-4)
            compared += 1
    assert compared == len(kept.samples) == 10


@pytest.mark.parametrize("kept", [0, 20])
def test_what_is_kept_is_bounded(tmp_path: Path, kept: int) -> None:
    paths = run_paths(tmp_path)
    spool(paths, range(1, 2))
    train(small_settings(max_steps=1, trainer__record_logprobs=kept), paths)
    files = list(paths.logprobs.glob("*")) if kept else []
    assert paths.logprobs.exists() == bool(kept)
    sizes = [len(s.logprobs) for file in files for s in decode(TrainedLogprobs, file.read_bytes()).samples]
    assert sum(sizes) <= kept and bool(sizes) == bool(kept)
