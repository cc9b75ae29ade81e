"""Every backend of every operation against the operation's plain reference, forward and, where it trains, backward.

Triton kernels run on a GPU, or else in Triton's interpreter, in a process of their own.
"""

import os
import subprocess
import sys
from collections.abc import Iterator
from importlib.util import find_spec
from typing import Any

import pytest
import torch
from ops_cases import CASES, Case
from torch import Tensor

from headway.models.ops import registry
from headway.models.ops.attention import flash
from headway.models.ops.registry import OPS, Backend

TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 0.02}
INTERPRETED = "TRITON_INTERPRET" in os.environ
WITH_CUDA = torch.cuda.is_available() and not INTERPRETED


def takes(case: Case, backend: Backend[..., Any]) -> bool:
    return not case.only or bool({backend.kind, backend.name.rpartition(":")[2]} & set(case.only))


def parameters() -> Iterator[Any]:
    for op in OPS.values():
        for backend in op.backends:
            for case in (case for case in CASES if case.op is op and takes(case, backend)):
                for dtype in [torch.bfloat16] if case.mixed or case.half else [torch.float32, torch.bfloat16]:
                    if backend.kind == "c" and dtype is not torch.float32:
                        continue
                    name = f"{op.name}-{backend.kind}-{backend.name.rpartition(':')[2]}-{case}-{dtype}"
                    marks = [pytest.mark.gpu] if backend.kind in ("triton", "cuda", "flash") and WITH_CUDA else []
                    yield pytest.param(backend, case, dtype, id=name.replace("torch.", ""), marks=marks)


@pytest.fixture(autouse=True)
def compiled() -> Iterator[None]:
    assert registry.enable("c"), "these tests need a C compiler"
    yield
    registry.disable("c")


@pytest.mark.parametrize(("backend", "case", "dtype"), list(parameters()))
def test_a_backend_equals_the_reference(backend: Backend[..., Any], case: Case, dtype: torch.dtype) -> None:
    if backend.kind == "triton" and not WITH_CUDA and not INTERPRETED:
        pytest.skip("needs a CUDA device or Triton's interpreter")
    if backend.kind in ("cuda", "flash") and not WITH_CUDA:
        pytest.skip("needs a CUDA device")
    if backend.kind == "flash" and not flash.installed():
        pytest.skip("needs flash-attn-4")
    device = "cuda" if WITH_CUDA and backend.kind != "c" else "cpu"
    draw = torch.Generator().manual_seed(0)
    given = [torch.randn(shape, generator=draw).to(device) for shape in case.inputs]
    given = [x if case.mixed and n else x.to(dtype) for n, x in enumerate(given)]
    ours = [x.clone().requires_grad_(backend.trains) for x in given]
    theirs = [x.float().requires_grad_(backend.trains) for x in given]
    found, expected = results(case.call(backend.run, *ours)), results(case.call(case.op.reference, *theirs))
    assert [x.shape for x in found] == [x.shape for x in expected]
    if case.valued:
        for a, b in zip(found, expected, strict=True):
            assert_close(a, b, TOLERANCE[dtype])
    if backend.trains:
        probes = [torch.randn(x.shape, generator=draw).to(device) for x in expected]
        ours_grads, their_grads = gradients(found, probes, ours), gradients(expected, probes, theirs)
        assert [x.dtype for x in ours_grads] == [x.dtype for x in ours]
        for a, b in zip(ours_grads, their_grads, strict=True):
            assert_close(a, b, TOLERANCE[dtype])


def test_every_backend_has_a_case() -> None:
    lacking = [
        f"{op.name}: {backend.name}"
        for op in OPS.values()
        for backend in op.backends
        if not any(case.op is op and takes(case, backend) for case in CASES)
    ]
    assert not lacking, f"give these a case in ops_cases.py: {lacking}"


@pytest.mark.skipif(WITH_CUDA or INTERPRETED, reason="Triton's kernels were run in this process")
@pytest.mark.skipif(find_spec("triton") is None, reason="needs triton")
def test_triton_kernels_equal_the_references_in_the_interpreter() -> None:
    """In a process of its own: Triton must not have been imported before. Its matrix products of bfloat16 are wrong."""
    which = "triton and (float32 or not (paged_attention or routed_experts or gated_ranks))"
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", __file__, "-k", which]
    done = subprocess.run(command, env=os.environ | {"TRITON_INTERPRET": "1"}, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-3000:]


def results(returned: Any) -> list[Tensor]:
    return [returned] if isinstance(returned, Tensor) else list(returned)


def gradients(outs: list[Tensor], probes: list[Tensor], inputs: list[Tensor]) -> tuple[Tensor, ...]:
    loss = sum((out * probe.to(out.dtype)).sum() for out, probe in zip(outs, probes, strict=True))
    assert isinstance(loss, Tensor)
    return torch.autograd.grad(loss, inputs)


def assert_close(found: Tensor, expected: Tensor, tolerance: float) -> None:
    if not found.is_floating_point():
        assert torch.equal(found, expected)
    assert (found.float() - expected.float()).norm() <= tolerance * expected.float().norm()
