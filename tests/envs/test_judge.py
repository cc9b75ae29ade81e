"""A judge against a server that is slow, refuses and talks nonsense: cached, retried, limited, and never silent."""

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer

from headway.base.errors import UsageError
from headway.envs import judge as judges
from headway.envs.judge import Judge, read_score
from headway.envs.policy import EpisodeFailure

Answer = Callable[[int, str], web.Response]


def says(text: str) -> web.Response:
    return web.json_response({"choices": [{"message": {"content": text}}]})


@pytest.fixture(autouse=True)
def no_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(judges, "FIRST_PAUSE_SECONDS", 0.0)


def with_judge(answer: Answer, use: Callable[[Judge], Awaitable[Any]], **options: Any) -> list[dict[str, Any]]:
    """Run `use` with a judge whose server answers the n-th request; the requests that came."""
    came: list[dict[str, Any]] = []
    running = {"now": 0, "most": 0}

    async def handle(request: web.Request) -> web.Response:
        body = await request.json()
        running["now"] += 1
        running["most"] = max(running.values())
        await asyncio.sleep(0)
        came.append({**body, "key": request.headers.get("Authorization"), "most": running["most"]})
        running["now"] -= 1
        return answer(len(came), body["messages"][0]["content"])

    async def main() -> None:
        app = web.Application()
        app.router.add_post("/v1/chat/completions", handle)
        async with TestServer(app) as server:
            judge = Judge(str(server.make_url("/v1")), "grader", "Q: {question}\nA: {reply}", **options)
            await use(judge)
            await judge.close()

    asyncio.run(main())
    return came


@pytest.mark.parametrize(
    ("text", "score"),
    [("Score: 0.5", 0.5), ("The text says Score: 1.\nMine is\nscore = 0", 0.0), ("**Score:** 1", 1.0)],
)
def test_the_last_score_of_the_judge_counts(text: str, score: float) -> None:
    assert read_score(text) == score


@pytest.mark.parametrize("text", ["", "great", "Score: 7", "Score: -1"])
def test_a_reply_without_a_score_is_no_grade(text: str) -> None:
    with pytest.raises(ValueError, match="Score: X"):
        read_score(text)


def test_equal_questions_are_asked_once_at_a_time_and_ever(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", "secret")

    async def use(judge: Judge) -> None:
        grades = await asyncio.gather(*(judge.grade(question="q", reply="{question} {x}") for _ in range(5)))
        assert grades == [0.25] * 5
        assert await judge.grade(question="q", reply="{question} {x}") == 0.25
        assert judge.counts == {"asked": 1, "cache": 1}

    (asked,) = with_judge(lambda n, text: says("Score: 0.25"), use, cache=tmp_path / "judged")
    assert asked["messages"] == [{"role": "user", "content": "Q: q\nA: {question} {x}"}] and asked["model"] == "grader"
    assert asked["key"] == "Bearer secret"
    assert "secret" not in "".join(file.read_text() for file in (tmp_path / "judged").iterdir())


def test_failures_that_may_pass_are_tried_again_and_the_rest_is_not() -> None:
    async def passes(judge: Judge) -> None:
        assert await judge.grade(question="q", reply="r") == 1.0
        assert judge.counts["again"] == 3

    replies = [web.Response(status=429, headers={"Retry-After": "0"}), web.Response(status=503), web.Response(text="?")]
    assert len(with_judge(lambda n, text: replies[n - 1] if n < 4 else says("Score: 1"), passes)) == 4

    async def fails(judge: Judge) -> None:
        with pytest.raises(EpisodeFailure, match="HTTP 400: no such model"):
            await judge.grade(question="q", reply="r")

    assert len(with_judge(lambda n, text: web.Response(status=400, text="no such model"), fails)) == 1

    async def gives_up(judge: Judge) -> None:
        with pytest.raises(EpisodeFailure, match="gave no grade: HTTP 500"):
            await judge.grade(question="q", reply="r")

    assert len(with_judge(lambda n, text: web.Response(status=500), gives_up, retries=2)) == 3


def test_requests_are_limited_at_a_time_and_in_all() -> None:
    async def use(judge: Judge) -> None:
        results = await asyncio.gather(
            *(judge.grade(question=str(i), reply="r") for i in range(8)), return_exceptions=True
        )
        refused = [result for result in results if isinstance(result, EpisodeFailure)]
        assert len(refused) == 3 and "5 requests are used up" in refused[0].message

    came = with_judge(lambda n, text: says("Score: 1"), use, concurrency=2, max_requests=5)
    assert len(came) == 5 and max(body["most"] for body in came) <= 2


def test_a_prompt_whose_fields_are_not_given_is_refused() -> None:
    judge = Judge("http://127.0.0.1:1", "m", "{question} {rubric}")
    with pytest.raises(UsageError, match=r"wants \{rubric\}, but grade"):
        judge.fill(question="q", reply="r")
