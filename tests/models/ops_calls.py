"""How operations are called, for `ops_cases`: what is made of tensors with gradients, and which results count."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from headway.models import ops
from headway.models.ops.attention.kv_cache import CachedHeads
from headway.models.ops.attention.layer import AttentionLayer
from headway.models.ops.attention.packed import PackedSamples
from headway.models.ops.attention.paged import Tiles
from headway.models.ops.experts.choose import Choice
from headway.models.ops.experts.form import ClampedSwiglu, ExpertForm
from headway.models.ops.experts.lists import GROUP, ExpertLists, expert_lists
from headway.models.ops.recurrent.chunks import SampleChunks, cut_samples
from headway.models.ops.recurrent.slots import SlotStates

Call = Callable[..., Any]
EPS = 1e-6


def angles(x: Tensor, size: int) -> tuple[Tensor, Tensor]:
    """cos and signed sin of all positions, (T, 1, size)."""
    turns = torch.arange(len(x), dtype=torch.float32)[:, None, None] * torch.linspace(1, 0.01, size // 2)
    cos, sin = turns.cos(), turns.sin()
    return torch.cat([cos, cos], -1).to(x.device), torch.cat([-sin, sin], -1).to(x.device)


def normed_heads(f: Call, q: Tensor, k: Tensor, *norms: Tensor) -> Any:
    return f(q, k, norms or None, EPS, *angles(q, q.shape[2]))


def normed_parts(f: Call, x: Tensor, q_weight: Tensor, k_weight: Tensor) -> Any:
    heads = x.shape[1] // 2
    return f(x, heads, (q_weight, k_weight), EPS, *angles(x, x.shape[2]))


def two_weights(f: Call, x: Tensor, *weights: Tensor) -> Any:
    return f(x, weights)


def adapters(f: Call, x: Tensor, *tensors: Tensor) -> Any:
    frozen = [torch.linspace(-1, 1, n * x.shape[1]).view(n, -1).to(x) for n in (9, 5)]
    return f(x, frozen, tensors[:2], tensors[2:], 0.5, False)


def several_adapters(f: Call, x: Tensor, *tensors: Tensor) -> Any:
    """Two tokens in three have one of the ranks each."""
    frozen = [torch.linspace(-1, 1, n * x.shape[1]).view(n, -1).to(x) for n in (9, 5)]
    gate = torch.tensor([[0.5, 0.0], [0.0, 2.0], [0.0, 0.0]], device=x.device).repeat(4, 1)[: len(x)]
    return f(x, frozen, tensors[:2], tensors[2:], gate, False)


def gated_ranks(f: Call, out: Tensor, ranks: Tensor, gate: Tensor, *ups: Tensor) -> Any:
    return f(out, ranks, gate.float(), ups)


def groups(f: Call, rows: Tensor, weight: Tensor) -> Any:
    return f(rows, weight, torch.tensor([4, 4, 11], dtype=torch.int32, device=rows.device))


def routed(f: Call, x: Tensor, gate_up: Tensor, down: Tensor) -> Any:
    """One expert has all tokens, one has none. The gates are some numbers of the tokens: they have gradients, too."""
    choices = torch.stack([torch.full((len(x),), 2), torch.arange(len(x)) % 2], 1).to(x.device)
    return f(x, x[:, :2].sigmoid(), choices, gate_up, down)


def form_of(*biases: Tensor) -> ExpertForm | None:
    """Where there are biases, of experts that have gates and ups by turns, some of which are bounded."""
    return ExpertForm(*biases, ClampedSwiglu(1.7, 2.0)) if biases else None


def routed_clamped(f: Call, x: Tensor, gate_up: Tensor, down: Tensor, *biases: Tensor) -> Any:
    return routed(lambda *own: f(*own, False, False, None, form_of(*biases)), x, gate_up, down)


def routed_to_stream(beside: bool) -> Call:
    def call(f: Call, x: Tensor, gate_up: Tensor, down: Tensor, *rest: Tensor) -> Any:
        stream, more, norm_weight, *biases = rest

        def add(*arguments: Tensor) -> Any:
            lists = expert_lists.reference(arguments[2], len(down))
            rest = stream, more if beside else None, norm_weight, EPS, lists, form_of(*biases)
            return f(*arguments, False, *rest)

        return routed(add, x, gate_up, down)

    return call


def whole_lists(lists: ExpertLists) -> tuple[Tensor, Tensor]:
    """Lists with -1 where nothing is listed, and their counts."""
    choices, counts = lists
    listed = torch.arange(GROUP, device=choices.device) < counts.unsqueeze(-1)
    return torch.where(listed.flatten(1), choices, -1), counts


def listed(f: Call, logits: Tensor) -> Any:
    return whole_lists(f(logits.topk(3).indices, logits.shape[1]))


def routed_rows(f: Call, rows: Tensor, gates: Tensor) -> Any:
    """Rows that lie anywhere; one is of no token."""
    places = torch.tensor([[3, 0, 6], [1, 5, 2]], device=rows.device)
    return f(rows, places, gates), f(rows, places)


def weighted_rows(f: Call, wide: Tensor, grad: Tensor, weights: Tensor) -> Any:
    return f(wide, grad, weights)


def chosen(biased: bool, choice: Choice, dtype: torch.dtype = torch.float32) -> Call:
    def call(f: Call, logits: Tensor) -> Any:
        """The reference makes no lists."""
        bias = torch.linspace(-0.5, 0.5, logits.shape[1], device=logits.device) if biased else None
        gates, experts, lists = f(logits, bias, None, choice, dtype)
        assert gates.dtype is dtype
        return gates, experts, *whole_lists(lists or expert_lists.reference(experts, logits.shape[1]))

    return call


def empty_cache(k: Tensor) -> tuple[CachedHeads, CachedHeads]:
    keys, values = (CachedHeads(torch.zeros(20, *k.shape[1:]).to(k)) for _ in range(2))
    return keys, values


def cached(f: Call, k: Tensor, v: Tensor) -> Any:
    keys, values = empty_cache(k)
    f(k, v, torch.tensor([7, 0, 11], device=k.device), keys, values)
    return keys.numbers, values.numbers


def heads_to_cache(f: Call, x: Tensor, *norms: Tensor) -> Any:
    """Heads that are parts of one tensor, as one product makes them."""
    q, k, v = x.split([6, 2, 2], dim=1)
    keys, values = empty_cache(k)
    slots = torch.tensor([7, 0, 11], device=k.device)
    out = f(q, k, v, norms or None, EPS, *angles(x, x.shape[2]), slots, keys, values)
    return out, keys.numbers, values.numbers


SIZE = 4
TABLE = [[3, 9, 1, 4, 0], [7, 2, 11, 5, 6], [10, 8, 12, 13, 14]]


def tokens_over_blocks(f: Call, q: Tensor, *cache: Tensor) -> Any:
    table, rows, positions = torch.tensor(TABLE), torch.tensor([2, 0, 1, 1]), torch.tensor([0, 17, 8, 3])
    return f(q, *map(CachedHeads, cache), table, rows, positions, SIZE, 17)


def tiles_over_blocks(
    size: int, make: Callable[[Tensor], CachedHeads] = CachedHeads, sinks: bool = False, **how: Any
) -> Call:
    def call(f: Call, q: Tensor, *cache: Tensor) -> Any:
        """A decoding sequence in parts of `size` keys, an empty tile, and a prompt of three tokens behind four others
        in tiles of two."""
        keys, values = map(make, cache)
        layer = AttentionLayer(0, sinks=q[0, :, 0].contiguous() if sinks else None, **how)
        table = torch.tensor(TABLE, dtype=torch.int32, device=q.device)
        parts = [[2, 0, 16, 1, number == 0, size, number, 1] for number in reversed(range(-(-17 // size)))]
        fields = torch.tensor([*parts, [0] * 8], device=q.device).T.contiguous()
        prompts = torch.tensor([[1, 1, 4, 2], [1, 3, 6, 1]], device=q.device).T.contiguous()
        arrived = torch.zeros((6, keys.numbers.shape[1]), dtype=torch.int32, device=q.device)
        out = torch.zeros_like(q)
        for _ in range(2):  # nothing is left of the first time
            f(q, keys, values, table, Tiles.split(fields, arrived), layer, SIZE, out)
        f(q, keys, values, table, Tiles.of(prompts, 2), layer, SIZE, out)
        assert not arrived.any()
        return out

    return call


def a_token_each(states: Tensor) -> SlotStates:
    """Of five samples, whose states lie among those of others."""
    return SlotStates(states.float().clone(), torch.tensor([4, 0, 6, 2, 5], device=states.device))


def conv_tokens(f: Call, x: Tensor, weight: Tensor, states: Tensor, *bias: Tensor) -> Any:
    """Channels that are part of a wider tensor."""
    kept = a_token_each(states)
    out, _ = f(x[:, : len(weight)], weight.unsqueeze(1), bias[0] if bias else None, [1] * 5, kept, torch.float32)
    return out, kept.tensor


def conv_samples(f: Call, x: Tensor, weight: Tensor, *bias: Tensor) -> Any:
    """Two samples are shorter than what the convolution reaches."""
    wide = x[:, : len(weight)]
    return f(wide, weight.unsqueeze(1), bias[0] if bias else None, [1, 40, 2, 27], None, torch.float32)


def conv_going_on(f: Call, x: Tensor, weight: Tensor, tails: Tensor) -> Any:
    """The same, with tails before them, which have no gradients."""
    found = f(x.detach(), weight.detach().unsqueeze(1), None, [1, 40, 2, 27], tails.detach().float(), torch.float32)
    return *found, (x.sum() + weight.sum() + tails.sum()).float()


def delta_tokens(f: Call, x: Tensor, gates: Tensor, states: Tensor) -> Any:
    """Queries and keys of two heads, values of six."""
    q, k, v = (part.unflatten(1, (heads, -1)) for part, heads in zip(x.split((48, 48, 120), 1), (2, 2, 6), strict=True))
    kept = a_token_each(states)
    out, _ = f(q, k, v, -gates.abs(), gates.sigmoid(), [1] * 5, kept)
    return out, kept.tensor


def ssd_tokens(f: Call, x: Tensor, steps: Tensor, rates: Tensor, states: Tensor) -> Any:
    """Inputs and readings of two groups, values of six heads."""
    v, b, c = (part.unflatten(1, (heads, -1)) for part, heads in zip(x.split((120, 48, 48), 1), (6, 2, 2), strict=True))
    kept = a_token_each(states)
    out, _ = f(v, steps.abs(), -rates.abs(), b, c, [1] * 5, kept)
    return out, kept.tensor


def carried(f: Call, written: Tensor, kept: Tensor, initial: Tensor) -> Any:
    """Samples of four chunks, of three, and of one."""
    (chunks,) = cut_samples((200, 130, 64), written.device).groups
    return f(written.float(), kept.float().sigmoid(), initial.float(), chunks)


def carried_corrected(f: Call, values: Tensor, answers: Tensor, keys: Tensor, kept: Tensor, initial: Tensor) -> Any:
    """Three samples of two short chunks each, and one of one."""
    (chunks,) = cut_samples((20, 32, 5, 17), values.device).groups
    values, answers, keys = (0.2 * x.float() for x in (values, answers, keys))
    return f(values, answers, keys, kept.float().sigmoid(), initial.float(), chunks)


def opened(f: Call, k: Tensor, v: Tensor, total: Tensor, beta: Tensor) -> Any:
    """Nobody asks for what stands in for tokens that a chunk lacks."""
    chunks = _group(k, total)
    exists = chunks.exists.unsqueeze(1)
    outs = f(0.3 * k.float(), v.float(), _decays(total), beta.float().sigmoid() * exists, chunks)
    return [out * exists.unsqueeze(-1) for out in outs]


def opened_alike(f: Call, k: Tensor, v: Tensor, total: Tensor) -> Any:
    """One key for all tokens, nothing decays: what corrections take from each other adds up over a whole chunk."""
    key = k.float() / k.float().norm(dim=-1, keepdim=True)
    chunks = _group(k, total)
    beta = torch.ones_like(total) * chunks.exists.unsqueeze(1)
    outs = f(key.expand(len(v), *key.shape[1:]), v.float(), 0 * total.float(), beta.float(), chunks)
    return [out * chunks.exists[:, None, :, None] for out in outs]


def read(f: Call, q: Tensor, k: Tensor, total: Tensor, before: Tensor, corrections: Tensor) -> Any:
    chunks = _group(q, total)
    q, k, before, corrections = (x.float() for x in (q, k, before, corrections))
    out = f(0.3 * q, 0.3 * k, _decays(total), before, corrections * chunks.exists[:, None, :, None], chunks)
    return out * chunks.exists[..., None, None]


def _decays(total: Tensor) -> Tensor:
    return -0.1 * total.float().abs().cumsum(-1)


def _group(x: Tensor, total: Tensor) -> SampleChunks:
    """The chunks of the size of `total`: samples of a few tokens beside others, some of them cut short."""
    lengths = (200, 5, 130, 64, 11) if total.shape[-1] == 64 else (20, 1, 32, 17)
    (group,) = [group for group in cut_samples(lengths, x.device).groups if group.size == total.shape[-1]]
    return group


def drawn(tempered: bool) -> Call:
    def call(f: Call, logits: Tensor) -> Any:
        noise = torch.linspace(0, 0.999, len(logits), device=logits.device)
        noise[:2] = -1
        return f(logits, torch.linspace(0.5, 2, len(logits), device=logits.device) if tempered else None, noise)

    return call


def samples(lengths: list[int]) -> Call:
    return lambda f, q, k, v: f(q, k, v, PackedSamples(lengths, q.device))


def first_pass(lengths: list[int]) -> Call:
    return lambda f, q, k, v: f(q, k, v, PackedSamples(lengths, q.device))[0]


def second_pass(lengths: list[int]) -> Call:
    def call(f: Call, q: Tensor, k: Tensor, v: Tensor, grad: Tensor) -> Any:
        """After the first pass of the same backend."""
        forward = ops.packed_attention_forward
        passes = {
            backward.run: each.run
            for backward in ops.packed_attention_backward.backends
            for each in forward.backends
            if each.kind == backward.kind
        }
        packed = PackedSamples(lengths, q.device)
        out, kept = passes.get(f, forward.reference)(q, k, v, packed)
        return f(grad, (q, k, v), out, kept, packed)

    return call


def windowed(lengths: list[int], window: int, passes: int = 0) -> Call:
    def call(f: Call, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor, *grad: Tensor) -> Any:
        """Samples of which all but a few first tokens are queries. `passes`: the first, or the second after it."""
        layer = AttentionLayer(0, window=window, sinks=sinks, scale=0.1)
        keys, queries = PackedSamples(lengths, q.device), PackedSamples([n - n // 4 for n in lengths], q.device)
        own = torch.cat([torch.arange(n // 4, n) + sum(lengths[:i]) for i, n in enumerate(lengths)]).to(q.device)
        q = q[own]
        if passes == 0:
            return f(q, k, v, queries, keys, layer)
        forward = f if passes == 1 else ops.windowed_attention_forward
        out, kept = forward(q, k, v, queries, keys, layer)
        return out if passes == 1 else f(grad[0][own], (q, k, v), out, kept, queries, keys, layer)

    return call


def norm(f: Call, x: Tensor, weight: Tensor) -> Any:
    return f(x, weight, EPS)


def norm_of_sum(f: Call, x: Tensor, delta: Tensor, weight: Tensor) -> Any:
    return f(x, delta, weight, EPS)


def plain(f: Call, *tensors: Tensor) -> Any:
    return f(*tensors)


def norm_of_parts(f: Call, x: Tensor, parts: Tensor, weight: Tensor) -> Any:
    return f(x, parts.float(), weight, EPS)
