"""A pass over the whole model in one call is the pass that the layers make."""

from collections.abc import Iterator

import pytest
import torch
from models_common import positions_of, random_model, random_tokens, run_packed, small
from torch import Tensor

from headway.inference.embedded.cpu.decoder import CpuDecoder
from headway.models.decoder import DecoderLM
from headway.models.ops import registry
from headway.models.serving import fuse_projections, swap_weights

BLOCK_SIZE = 4
LENGTHS = [5, 1, 30, 9, 12, 40]


@pytest.fixture(autouse=True)
def compiled() -> Iterator[None]:
    assert registry.enable("c"), "these tests need a C compiler"
    yield
    registry.disable("c")


class Cached:
    """A model and a cache with room for sequences of up to 64 tokens, their blocks in no order."""

    def __init__(self, model: DecoderLM, sequences: int) -> None:
        config = model.config
        fuse_projections(model)
        blocks = torch.randperm(sequences * 64 // BLOCK_SIZE, generator=torch.Generator().manual_seed(3))
        shape = (config.layers, len(blocks) * BLOCK_SIZE, config.kv_heads, config.head_dim)
        table = blocks.view(sequences, -1).numpy()
        self.decoder = CpuDecoder(model, list(torch.zeros(shape)), list(torch.zeros(shape)), BLOCK_SIZE, table)

    @torch.inference_mode()
    def run(self, ids: Tensor, starts: list[int], counts: list[int], wanted: Tensor | None = None) -> Tensor:
        assert self.decoder.takes(len(ids))
        rows = torch.arange(len(counts)).repeat_interleave(torch.tensor(counts))
        positions = positions_of(counts) + torch.tensor(starts)[rows]
        which = None if wanted is None else wanted.numpy()
        return self.decoder(ids.tolist(), positions.numpy(), rows.numpy(), which).clone()


def layers_pass(model: DecoderLM, ids: Tensor, lengths: list[int]) -> Tensor:
    with torch.no_grad():
        return run_packed(model, ids, lengths).hidden_TD


@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize("changes", [{}, {"heads": 6, "kv_heads": 1, "head_dim": 10, "width": 37, "mlp_width": 29}])
@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_prompts_and_what_follows_them(family: str, changes: dict[str, int], threads: int) -> None:
    model = random_model(small(family, **changes))
    ids = random_tokens(model.config, LENGTHS)
    expected = layers_pass(model, ids, LENGTHS).split(LENGTHS)
    cached, samples = Cached(model, len(LENGTHS)), ids.split(LENGTHS)
    heads = [length // 2 for length in LENGTHS]
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        first = cached.run(torch.cat([s[:n] for s, n in zip(samples, heads, strict=True)]), [0] * len(heads), heads)
        tails = [length - n for length, n in zip(LENGTHS, heads, strict=True)]
        rest = cached.run(torch.cat([s[n:] for s, n in zip(samples, heads, strict=True)]), heads, tails)
    finally:
        torch.set_num_threads(before)
    parts = zip(first.split(heads), rest.split(tails), strict=True)
    for (begun, ended), whole in zip(parts, expected, strict=True):
        assert (torch.cat([begun, ended]) - whole).abs().max() < 1e-4


def test_a_token_is_the_same_to_the_bit_in_any_batch() -> None:
    model = random_model(small("qwen3"))
    cached, ids = Cached(model, len(LENGTHS)), random_tokens(model.config, LENGTHS)
    together = cached.run(ids, [0] * len(LENGTHS), LENGTHS).split(LENGTHS)[0]
    alone = cached.run(ids[: LENGTHS[0]], [0], LENGTHS[:1])
    assert torch.equal(alone, together)


def test_some_tokens_alone_are_what_they_are_among_all() -> None:
    model = random_model(small("qwen3"))
    cached, ids = Cached(model, len(LENGTHS)), random_tokens(model.config, LENGTHS)
    everyone = cached.run(ids, [0] * len(LENGTHS), LENGTHS)
    for wanted in (torch.tensor(LENGTHS).cumsum(0) - 1, torch.tensor([40, 3, 3]), torch.arange(0)):
        assert torch.equal(cached.run(ids, [0] * len(LENGTHS), LENGTHS, wanted), everyone[wanted])


def test_new_weights_are_seen() -> None:
    live, standby = random_model(small("qwen3"), seed=1), random_model(small("qwen3"), seed=2)
    ids = random_tokens(live.config, [9])
    expected = layers_pass(standby, ids, [9])
    cached = Cached(live, 1)
    assert (cached.run(ids, [0], [9]) - expected).abs().max() > 0.1
    fuse_projections(standby)
    swap_weights(live, standby)
    assert (cached.run(ids, [0], [9]) - expected).abs().max() < 1e-4
    live.to(torch.float64).to(torch.float32)
    fuse_projections(live)
    assert (cached.run(ids, [0], [9]) - expected).abs().max() < 1e-4


@pytest.mark.parametrize(
    "model",
    [
        random_model(small("qwen3_moe")),
        random_model(small("qwen3", attention_bias=True)),
        random_model(small("llama", mlp_bias=True)),
        random_model(small("qwen3")).to(torch.bfloat16),
    ],
)
@torch.inference_mode()
def test_what_it_lacks_is_left_to_the_layers(model: DecoderLM) -> None:
    assert not Cached(model, 1).decoder.takes(8)


def test_it_is_for_serving_alone() -> None:
    cached = Cached(random_model(small("qwen3")), 1)
    assert not cached.decoder.takes(8)
    with torch.inference_mode():
        assert cached.decoder.takes(8)
        registry.disable("c")
        assert not cached.decoder.takes(8)
