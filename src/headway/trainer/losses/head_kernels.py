"""The head's elementwise work on CUDA: one pass over a chunk's logits each way, in place, instead of a dozen.

Logits stay in the precision of the matrix product; every number computed from them is float32.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK = 4096


def row_products(hidden_CD: Tensor, table_VD: Tensor, targets_C: Tensor) -> Tensor:
    """Compute the logits of the targets, (C,) in float32, not rounded to the precision of the others."""
    rows, width = hidden_CD.shape
    products_C = torch.empty(rows, dtype=torch.float32, device=hidden_CD.device)
    if rows:
        block = triton.next_power_of_2(width)
        strides = hidden_CD.stride(0), table_VD.stride(0)
        _row_products[(rows,)](hidden_CD, table_VD, targets_C, products_C, width, *strides, block)
    return products_C


def reduce_rows(
    logits_CV: Tensor, exact_C: Tensor | None, targets_C: Tensor, temperatures_C: Tensor, *, keep: bool = False
) -> tuple[Tensor, Tensor, Tensor]:
    """Compute logprobs of the targets, whose logits are `exact` where given, entropies, and the logarithms of the
    normalizers, all (C,) in float32. The logits stay, whether told to `keep` them or not.
    """
    results = [torch.empty(len(logits_CV), dtype=torch.float32, device=logits_CV.device) for _ in range(3)]
    if len(logits_CV):
        _reduce_rows[(len(logits_CV),)](
            logits_CV, temperatures_C if exact_C is None else exact_C, targets_C, temperatures_C, *results,
            logits_CV.shape[1], logits_CV.stride(0), exact_C is not None, BLOCK, num_warps=8,
        )  # fmt: skip
    return results[0], results[1], results[2]


def to_gradient_(
    logits_CV: Tensor,
    targets_C: Tensor,
    temperatures_C: Tensor,
    normalizer_C: Tensor,
    grad_C: Tensor,
    entropy: tuple[Tensor, Tensor] | None = None,
) -> Tensor:
    """Overwrite the logits by the gradient of Σ grad·logprob with respect to them, plus that of the entropies, given
    with their gradients."""
    if len(logits_CV):
        vocab = logits_CV.shape[1]
        _to_gradient[(len(logits_CV), triton.cdiv(vocab, BLOCK))](
            logits_CV, targets_C, temperatures_C, normalizer_C, grad_C, *(entropy or (grad_C, grad_C)),
            vocab, logits_CV.stride(0), entropy is not None, BLOCK, num_warps=8,
        )  # fmt: skip
    return logits_CV


@triton.jit  # type: ignore[untyped-decorator]  # triton has no types
def _row_products(hidden, table, targets, products, width, hidden_stride, table_stride, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    row = tl.program_id(0).to(tl.int64)
    target = tl.load(targets + row)
    columns = tl.arange(0, BLOCK)
    inside = columns < width
    h = tl.load(hidden + row * hidden_stride + columns, mask=inside, other=0.0).to(tl.float32)
    w = tl.load(table + target * table_stride + columns, mask=inside, other=0.0).to(tl.float32)
    tl.store(products + row, tl.sum(h * w, 0))


@triton.jit  # type: ignore[untyped-decorator]  # triton has no types
def _reduce_rows(  # type: ignore[no-untyped-def]
    logits, exact, targets, temperatures, logprobs, entropies, normalizers, vocab, stride,
    EXACT: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    start_of_row = logits + row * stride
    temperature = tl.load(temperatures + row)
    # Exponents of 2 and not of e: the factor between them is free where the temperature is divided out anyway.
    scale = 1.4426950408889634 / temperature
    largest = -1e30
    # Added up column by column, for adding up a block would make its threads wait for each other.
    total = tl.zeros((BLOCK,), dtype=tl.float32)
    # Of exponents below the largest: those themselves would be rounded where their difference is all that counts.
    weighted = tl.zeros((BLOCK,), dtype=tl.float32)
    for start in range(0, vocab, BLOCK):
        columns = start + tl.arange(0, BLOCK)
        inside = columns < vocab
        x = tl.load(start_of_row + columns, mask=inside, other=0.0).to(tl.float32) * scale
        x = tl.where(inside, x, -1e30)
        new_largest = tl.maximum(largest, tl.max(x, 0))
        shrink = tl.exp2(largest - new_largest)
        e = tl.exp2(x - new_largest)
        weighted = (weighted + (largest - new_largest) * total) * shrink + e * (x - new_largest)
        total = total * shrink + e
        largest = new_largest
    sum_of_all = tl.sum(total, 0)
    normalizer = (largest + tl.log2(sum_of_all)) * 0.6931471805599453
    logprob = tl.load(start_of_row + tl.load(targets + row)).to(tl.float32) / temperature - normalizer
    if EXACT:
        # In the normalizer as well: where a token is all but certain both are the same number.
        target = tl.load(exact + row) / temperature - normalizer
        logprob = target - tl.log(1 + (tl.exp(target) - tl.exp(logprob)))
    tl.store(logprobs + row, logprob)
    tl.store(entropies + row, (tl.log2(sum_of_all) - tl.sum(weighted, 0) / sum_of_all) * 0.6931471805599453)
    tl.store(normalizers + row, normalizer)


@triton.jit  # type: ignore[untyped-decorator]  # triton has no types
def _to_gradient(  # type: ignore[no-untyped-def]
    logits, targets, temperatures, normalizers, grads, entropies, entropy_grads, vocab, stride,
    ENTROPY: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = columns < vocab
    places = logits + row * stride + columns
    temperature = tl.load(temperatures + row)
    logprob = tl.load(places, mask=inside, other=0.0).to(tl.float32) / temperature - tl.load(normalizers + row)
    probability = tl.exp(logprob)
    hit = tl.where(columns == tl.load(targets + row), 1.0, 0.0)
    gradient = (hit - probability) * (tl.load(grads + row) / temperature)
    if ENTROPY:
        surplus = logprob + tl.load(entropies + row)
        gradient -= probability * surplus * (tl.load(entropy_grads + row) / temperature)
    tl.store(places, gradient, mask=inside)
