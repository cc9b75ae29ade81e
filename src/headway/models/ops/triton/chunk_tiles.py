"""Parts that kernels for chunks share: a program has one head of a chunk, and reads its tokens where they are.

Matrices of a chunk's size stay on the chip, others pass in tiles of some columns. Backward passes compute what they
need again; gradients of keys and queries that heads share are summed over these at last.
"""

import triton
import triton.language as tl
from torch import Tensor

TILE = {"COLUMNS": 32, "num_warps": 4, "num_stages": 3}
"""With more columns registers no longer suffice."""


@triton.jit  # type: ignore[untyped-decorator]  # triton has no types
def of_program(tokens, heads, CHUNK: tl.constexpr):  # type: ignore[no-untyped-def]  # arguments are pointers to the compiler
    """Say what a program has: its chunk and head, counted together; its head; where the chunk begins, its positions,
    and the tokens there."""
    at = tl.program_id(0).to(tl.int64)
    start, t = at // heads * CHUNK, tl.arange(0, CHUNK)
    return at, (at % heads).to(tl.int32), start, t, tl.load(tokens + start + t).to(tl.int32)


@triton.jit
def decay_within(total, t):  # type: ignore[no-untyped-def]  # arguments are blocks to the compiler
    """Compute the decay from each later to each earlier position, 0 above the diagonal."""
    later = t[:, None] < t[None, :]
    return tl.exp(tl.where(later, float("-inf"), total[:, None] - total[None, :]))


@triton.jit  # type: ignore[untyped-decorator]  # triton has no types
def load_rows(x, rows, c, SIZE: tl.constexpr):  # type: ignore[no-untyped-def]  # arguments are pointers to the compiler
    """Load some columns of the rows that begin at `rows`."""
    return tl.load(x + rows[:, None] + c[None, :], mask=(c < SIZE)[None, :], other=0.0)


@triton.jit  # type: ignore[untyped-decorator]  # triton has no types
def load_turned(x, rows, c, SIZE: tl.constexpr):  # type: ignore[no-untyped-def]  # arguments are pointers to the compiler
    """Load the same, transposed."""
    return tl.load(x + rows[None, :] + c[:, None], mask=(c < SIZE)[:, None], other=0.0)


@triton.jit  # type: ignore[untyped-decorator]  # triton has no types
def products(x, y, rows, DIM: tl.constexpr, CHUNK: tl.constexpr, COLUMNS: tl.constexpr):  # type: ignore[no-untyped-def]
    """Multiply x yᵀ, of rows that begin at `rows`."""
    found = tl.zeros((CHUNK, CHUNK), tl.float32)
    for start in range(0, DIM, COLUMNS):
        c = start + tl.arange(0, COLUMNS)
        found = tl.dot(load_rows(x, rows, c, DIM), load_turned(y, rows, c, DIM), found, input_precision="tf32x3")
    return found


def summed(grad_THD: Tensor, shared: int) -> Tensor:
    """Sum the gradient of each head over those that share queries or keys."""
    each = grad_THD.shape[1] // shared
    return grad_THD if each == 1 else grad_THD.view(len(grad_THD), shared, each, -1).sum(2)
