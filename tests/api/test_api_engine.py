"""An engine in this process: texts and conversations in, replies with their tokens out."""

import asyncio
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

import headway
from headway.base.errors import HeadwayError, UsageError


@pytest.fixture(scope="module")
def engine() -> Iterator[headway.Engine]:
    with headway.Engine("tiny", placement={"device": "cpu"}) as engine:
        yield engine


def test_prompts_are_texts_conversations_or_lists_of_them(engine: headway.Engine) -> None:
    one = engine.generate("abc", max_tokens=4, temperature=0.0)
    same = engine.generate([{"role": "user", "content": "abc"}], max_tokens=4, temperature=0.0)
    both = engine.generate(["abc", [{"role": "user", "content": "abc"}]], max_tokens=4, temperature=0.0)
    assert one.token_ids == same.token_ids == both[0].token_ids == both[1].token_ids
    assert 1 <= len(one.token_ids) == len(one.logprobs) <= 4 and one.finish_reason in ("stop", "length")
    assert isinstance(one.text, str) and one.message.role == "assistant"
    assert engine.generate([]) == []


def test_it_works_from_threads_and_beside_a_running_loop(engine: headway.Engine) -> None:
    """As in a notebook, whose kernel has a loop of its own."""

    async def inside() -> int:
        return len(engine.generate("abc", max_tokens=2).token_ids)

    assert asyncio.run(inside()) <= 2
    with ThreadPoolExecutor(4) as pool:
        replies = list(pool.map(lambda text: engine.generate(text, max_tokens=3, temperature=0.0), ["a", "b"] * 2))
    assert replies[0].token_ids == replies[2].token_ids


def test_mistakes_are_said(engine: headway.Engine) -> None:
    with pytest.raises(UsageError, match=r"does not know heat; it takes .*temperature"):
        engine.generate("abc", heat=1.0)
    with pytest.raises(UsageError, match="a prompt is a text or a list of messages"):
        engine.generate([{"content": "nobody says this"}])
    with pytest.raises(UsageError, match="a prompt is a text or a list of messages"):
        engine.generate(3)  # type: ignore[call-overload]
    with pytest.raises(UsageError, match=r"inference\.engine"):
        headway.Engine("tiny", inference={"engine": "steam"})
    with pytest.raises(UsageError, match="inferenc is not a setting; did you mean inference"):
        headway.Engine("tiny", inferenc={"engine": "vllm"})
    closed = headway.Engine("tiny", placement={"device": "cpu"})
    closed.close()
    closed.close()
    with pytest.raises(UsageError, match="was closed"):
        closed.generate("abc")


@pytest.mark.parametrize(
    ("sampling", "said"),
    [
        ({"max_tokens": "many"}, r"got `str` - at `\$\.max_tokens`"),
        ({"max_tokens": -8}, "max_tokens must be 1 or more"),
        ({"stop_token_ids": 3}, r"got `int` - at `\$\.stop_token_ids`"),
        ({"temperature": -1.0}, "temperature must be 0 to"),
    ],
)
def test_sampling_that_no_engine_can_do_is_refused(engine: headway.Engine, sampling: dict[str, Any], said: str) -> None:
    with pytest.raises(HeadwayError, match=said):
        engine.generate("abc", **sampling)


def test_a_prompt_that_no_context_holds_is_refused(engine: headway.Engine) -> None:
    with pytest.raises(HeadwayError, match=r"the context of .* is exceeded"):
        engine.generate("abc " * 5000, max_tokens=1)
