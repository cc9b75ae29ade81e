"""What is said of an engine's logprobs: within rounding they are right, beyond it the place is named."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headway.core.protocol import WeightProbe
from headway.inference.probe import TOLERANCES, Served, mismatch

LAYERS = 4
STREAM = [1.0, 1.5, 2.0, 2.5, 3.0, 1.2]
PLACES = ["the embedding", *(f"layer {i}" for i in range(LAYERS)), "the final norm"]


def probe(dtype: str = "float32") -> WeightProbe:
    return WeightProbe([5, 3, 8, 1], [-4.0, -5.5, -3.25], dtype, STREAM)


def served(off: float, dtype: str = "float32", stream: list[float] | None = None) -> Served:
    return Served([value + off for value in probe().logprobs], dtype, stream)


@given(
    dtypes=st.tuples(st.sampled_from(list(TOLERANCES)), st.sampled_from(list(TOLERANCES))),
    off=st.floats(-2, 2).filter(lambda off: abs(off) > 1e-9),
)
def test_the_coarser_precision_decides_what_is_rounding(dtypes: tuple[str, str], off: float) -> None:
    allowed = max(TOLERANCES[dtype].logprobs for dtype in dtypes)
    found = mismatch(probe(dtypes[0]), served(off * allowed, dtypes[1]))
    if not math.isclose(abs(off), 1, rel_tol=1e-6):
        assert (found is not None) == (abs(off) > 1)


@pytest.mark.parametrize(("spread", "right"), [(0.1, False), (1.0, False), (5.0, True)])
def test_rounding_is_relative_to_how_far_logprobs_are_spread(spread: float, right: bool) -> None:
    logprobs = [-10.0 + spread, -10.0 - spread] * 8
    wide = WeightProbe([1] * 17, logprobs, "bfloat16", STREAM)
    off = 3 * TOLERANCES["bfloat16"].logprobs
    assert (mismatch(wide, Served([value + off for value in logprobs], "bfloat16")) is None) == right


@pytest.mark.parametrize("place", range(len(STREAM)))
@pytest.mark.parametrize("size", [1e-4, 1e-2])
def test_the_first_place_that_leaves_the_trainers_path_is_named(place: int, size: float) -> None:
    rounding = [1 + 3e-7 * (-1) ** i for i in range(len(STREAM))]
    drift = [size * (1 + i - place) if i >= place else 0.0 for i in range(len(STREAM))]
    stream = [value * (r + d) for value, r, d in zip(STREAM, rounding, drift, strict=True)]
    found = mismatch(probe(), served(0.5, stream=stream))
    assert found is not None and f"{PLACES[place]} is suspect" in found


def test_where_the_stream_agrees_the_head_is_named() -> None:
    stream = [value * (1 + 1e-6) for value in STREAM]
    found = mismatch(probe(), served(0.5, stream=stream))
    assert found is not None and "the head is suspect" in found


def test_a_stream_that_is_not_a_number_is_named_where_it_begins() -> None:
    found = mismatch(probe(), served(math.nan, stream=[*STREAM[:2], *[math.nan] * 4]))
    assert found is not None and "layer 1 is suspect" in found


@pytest.mark.parametrize("stream", [None, [1.0, 2.0]])
def test_without_a_stream_no_layer_is_blamed(stream: list[float] | None) -> None:
    found = mismatch(probe(), served(0.5, stream=stream))
    assert found is not None and "can't be told" in found


def test_a_precision_nobody_knows_proves_nothing() -> None:
    assert mismatch(probe(), served(0.5, "float8_e4m3fn")) is None
