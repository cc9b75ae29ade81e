"""Recurrences of packed samples: equal to the recurrence token by token, however samples are packed and cut."""

from collections.abc import Callable, Sequence

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from headway.models import ops
from headway.models.attention import PackedPlan
from headway.models.ops.recurrent.chunks import precision
from headway.models.packed import States

HEADS, GROUPS, SIZE, VALUES, WIDTH = 4, 2, 6, 5, 4

torch.manual_seed(0)
KERNEL, BIAS = torch.randn(VALUES, 1, WIDTH), torch.randn(VALUES)
RATE = -torch.linspace(0.1, 3, HEADS)


def delta(inputs: Sequence[Tensor], lengths: Sequence[int], states: States | None) -> tuple[Tensor, States]:
    q, k, v, decay, beta = inputs
    before = None if states is None else states[0]
    out, final = ops.gated_delta_rule(q, k, v.to(precision(v)), decay, beta, lengths, before)
    return out, (final,)


def ssd(inputs: Sequence[Tensor], lengths: Sequence[int], states: States | None) -> tuple[Tensor, States]:
    x, step, b, c = inputs
    before = None if states is None else states[0]
    out, final = ops.ssd_scan(x.to(precision(x)), step, RATE, b, c, lengths, before)
    return out, (final,)


def conv(inputs: Sequence[Tensor], lengths: Sequence[int], states: States | None) -> tuple[Tensor, States]:
    out, final = ops.causal_conv(*inputs, KERNEL, BIAS, lengths, None if states is None else states[0])
    return out.float(), (final,)


def delta_inputs(tokens: int) -> list[Tensor]:
    decay, beta = -2 * torch.rand(tokens, HEADS), torch.rand(tokens, HEADS)
    q, k = torch.randn(2, tokens, GROUPS, SIZE)
    return [q, k, torch.randn(tokens, HEADS, VALUES), decay, beta]


def ssd_inputs(tokens: int) -> list[Tensor]:
    b, c = torch.randn(2, tokens, GROUPS, SIZE)
    return [torch.randn(tokens, HEADS, VALUES), torch.rand(tokens, HEADS), b, c]


def conv_inputs(tokens: int) -> list[Tensor]:
    return [torch.randn(tokens, VALUES)]


def delta_by_token(inputs: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
    """The definition, one token after the other."""
    q, k, v, decay, beta = inputs
    q, k = (F.normalize(x, dim=-1, eps=1e-6).repeat_interleave(HEADS // GROUPS, 1) for x in (q, k))
    outs, state = [], torch.zeros(HEADS, SIZE, VALUES)
    for t in range(len(q)):
        state = state * decay[t].exp()[:, None, None]
        change = beta[t, :, None] * (v[t] - torch.einsum("hd,hdv->hv", k[t], state))
        state = state + torch.einsum("hd,hv->hdv", k[t], change)
        outs.append(torch.einsum("hd,hdv->hv", q[t], state) / SIZE**0.5)
    return torch.stack(outs), state


def ssd_by_token(inputs: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
    x, step, b, c = inputs
    b, c = (x.repeat_interleave(HEADS // GROUPS, 1) for x in (b, c))
    outs, state = [], torch.zeros(HEADS, SIZE, VALUES)
    for t in range(len(x)):
        state = (step[t] * RATE).exp()[:, None, None] * state
        state = state + torch.einsum("hd,hv->hdv", b[t], step[t, :, None] * x[t])
        outs.append(torch.einsum("hd,hdv->hv", c[t], state))
    return torch.stack(outs), state


def conv_by_token(inputs: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
    rows = torch.cat((torch.zeros(WIDTH - 1, VALUES), *inputs))
    outs = [(rows[t : t + WIDTH] * KERNEL[:, 0].T).sum(0) + BIAS for t in range(len(inputs[0]))]
    return F.silu(torch.stack(outs)), rows[-(WIDTH - 1) :]


Make = Callable[[int], list[Tensor]]
ByToken = Callable[[Sequence[Tensor]], tuple[Tensor, Tensor]]
RULES = [(delta, delta_inputs, delta_by_token), (ssd, ssd_inputs, ssd_by_token), (conv, conv_inputs, conv_by_token)]
rules = pytest.mark.parametrize(("rule", "make", "by_token"), RULES, ids=["delta", "ssd", "conv"])
Rule = Callable[[Sequence[Tensor], Sequence[int], States | None], tuple[Tensor, States]]


@rules
@pytest.mark.parametrize("lengths", [[1], [70], [64, 128], [9, 1, 130, 1, 16, 3, 65], [1, 1, 1]])
def test_packed_samples_equal_their_recurrence(rule: Rule, make: Make, by_token: ByToken, lengths: list[int]) -> None:
    torch.manual_seed(1)
    inputs = [x.requires_grad_() for x in make(sum(lengths))]
    out, (final,) = rule(inputs, lengths, None)
    weights, final_weights = torch.randn(out.shape), torch.randn(final.shape)
    grads = torch.autograd.grad((out * weights).sum() + (final * final_weights).sum(), inputs)
    singles = zip(*(x.split(lengths) for x in inputs), strict=True)
    outs, finals = zip(*(by_token(sample) for sample in singles), strict=True)
    torch.testing.assert_close(out, torch.cat(outs), atol=2e-5, rtol=1e-4)
    torch.testing.assert_close(final, torch.stack(finals), atol=2e-5, rtol=1e-4)
    expected = torch.autograd.grad(
        (torch.cat(outs) * weights).sum() + (torch.stack(finals) * final_weights).sum(), inputs
    )
    for grad, right in zip(grads, expected, strict=True):
        torch.testing.assert_close(grad, right, atol=1e-4, rtol=1e-4)


@rules
@settings(max_examples=10, deadline=None)
@given(data=st.data())
def test_any_cutting_of_any_packing_gives_the_same(
    rule: Rule, make: Make, by_token: ByToken, data: st.DataObject
) -> None:
    """Samples run part by part, some in each pass, as an engine runs them: like one sample at a time."""
    torch.manual_seed(2)
    lengths = data.draw(st.lists(st.integers(1, 80), min_size=1, max_size=3), label="lengths")
    samples = [make(length) for length in lengths]
    shape = rule(samples[0], [lengths[0]], None)[1][0].shape[1:]
    done, outs = [0] * len(lengths), [[] for _ in lengths]
    states: list[States | None] = [None] * len(lengths)
    while unfinished := [i for i, length in enumerate(lengths) if done[i] < length]:
        some = data.draw(st.lists(st.sampled_from(unfinished), min_size=1, unique=True), label="pass")
        counts = [data.draw(st.integers(1, lengths[i] - done[i]), label="tokens") for i in some]
        parts = [[x[done[i] : done[i] + count] for x in samples[i]] for i, count in zip(some, counts, strict=True)]
        inputs = [torch.cat(each) for each in zip(*parts, strict=True)]
        before = torch.stack([torch.zeros(shape) if (state := states[i]) is None else state[0] for i in some])
        out, (after,) = rule(inputs, counts, (before,))
        for i, count, part, state in zip(some, counts, out.split(counts), after, strict=True):
            outs[i].append(part)
            states[i] = (state,)
            done[i] += count
    for i, length in enumerate(lengths):
        alone, (final,) = rule(samples[i], [length], None)
        torch.testing.assert_close(torch.cat(outs[i]), alone, atol=2e-5, rtol=1e-4)
        state = states[i]
        assert state is not None
        torch.testing.assert_close(state[0], final[0], atol=2e-5, rtol=1e-4)


@rules
def test_packed_samples_never_leak_state(rule: Rule, make: Make, by_token: ByToken) -> None:
    torch.manual_seed(3)
    inputs = make(100)
    plan = PackedPlan([33, 1, 66])
    out = plan.recur(0, rule, inputs)
    changed = [torch.cat((torch.rand_like(x[:34]), x[34:])) for x in inputs]
    torch.testing.assert_close(plan.recur(0, rule, changed)[34:], out[34:], atol=0, rtol=0)
    assert not torch.equal(plan.recur(0, rule, changed)[:34], out[:34])


@rules
def test_nothing_is_rounded_to_the_models_precision_before_the_norm(rule: Rule, make: Make, by_token: ByToken) -> None:
    torch.manual_seed(4)
    inputs = [x.bfloat16() for x in make(20)]
    out, (final,) = rule(inputs, [20], None)
    expected, final_expected = by_token([x.float() for x in inputs])
    torch.testing.assert_close(out, expected, atol=2e-5, rtol=1e-4)
    torch.testing.assert_close(final[0].float(), final_expected, atol=2e-5, rtol=1e-4)
