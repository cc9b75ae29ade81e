"""Algorithms that ask or follow another model: opd, opsd, sft, echo, and the client that they ask with."""

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer
from handmade_groups import make_group, make_trace

from headway.algorithms.base import Context
from headway.algorithms.opsd import Opsd
from headway.algorithms.reference import ReferenceModel, parse_prompt_logprobs
from headway.algorithms.registry import make_algorithm
from headway.algorithms.sft import Sft
from headway.base.errors import HeadwayError, UsageError
from headway.config import algorithms as settings_of
from headway.config.algorithms import ReferenceSettings
from headway.core.episodes import Episode, Node, Task, Trace
from headway.core.messages import Message
from headway.core.protocol import GenerateRequest
from headway.envs.samples import episode_samples
from headway.models.tiny_tokenizer import save_tiny_tokenizer
from headway.rendering.load import load_renderer

Handler = Callable[[dict[str, Any]], web.Response]


def ours(body: dict[str, Any]) -> web.Response:
    """log p of token t at place i is -(t + i / 100)."""
    entries: list[Any] = [
        {"token": "", "token_id": t, "logprob": -(t + i / 100)} for i, t in enumerate(body["token_ids"])
    ]
    return web.json_response({"prompt_logprobs": [None, *entries[1:]]})


def vllms(body: dict[str, Any]) -> web.Response:
    entries: list[Any] = [
        {str(t): {"logprob": -(t + i / 100), "rank": 3}, "9999": {"logprob": -0.1, "rank": 1}}
        for i, t in enumerate(body["token_ids"])
    ]
    return web.json_response({"prompt_logprobs": [None, *entries[1:]]})


def with_server(handler: Handler, use: Callable[[str], Awaitable[None]]) -> list[dict[str, Any]]:
    """Run `use(base_url)` against a server; the bodies that it got."""
    bodies: list[dict[str, Any]] = []

    async def generate(request: web.Request) -> web.Response:
        bodies.append(await request.json())
        return handler(bodies[-1])

    async def main() -> None:
        app = web.Application()
        app.router.add_post("/inference/v1/generate", generate)
        async with TestServer(app) as server:
            await use(str(server.make_url("/")))

    asyncio.run(main())
    return bodies


@pytest.mark.parametrize("handler", [ours, vllms])
def test_opd_puts_the_teachers_logprobs_on_sampled_tokens(handler: Handler) -> None:
    group = make_group(make_trace(0.0, prompt=2, reply=3))

    async def use(url: str) -> None:
        algorithm = make_algorithm(settings_of.Opd(teacher=ReferenceSettings(base_url=url, model="teacher")), Context())
        await algorithm.query_references(group)
        algorithm.score(group)
        await algorithm.close()

    bodies = with_server(handler, use)
    (_, sample), *_ = group.samples()
    assert sample.ref_logprobs.tolist() == pytest.approx([0, 0, -10.02, -11.03, -12.04])
    assert sample.ref_kl_weight.tolist() == [0, 0, 1, 1, 1]
    assert not sample.rl_weight.any() and not sample.ce_weight.any() and not sample.advantages.any()
    assert bodies[0]["model"] == "teacher" and bodies[0]["sampling_params"]["prompt_logprobs"] == 0


def test_a_kl_penalty_is_added_to_what_the_algorithm_wrote_but_only_to_batches() -> None:
    group = make_group(make_trace(0.0, prompt=2, reply=3), make_trace(1.0, prompt=2, reply=3))

    async def use(url: str) -> None:
        kl = settings_of.KlPenalty(coefficient=0.01, reference=ReferenceSettings(base_url=url, model="start"))
        algorithm = make_algorithm(settings_of.Grpo(), Context(), kl)
        assert algorithm.relative
        await algorithm.query_references(group)
        algorithm.score(group)
        assert not any(sample.ref_kl_weight.any() for _, sample in group.samples())  # no signal of its own
        algorithm.finish_batch([group])
        await algorithm.close()

    bodies = with_server(ours, use)
    assert len(bodies) == 2 and bodies[0]["model"] == "start"
    for (_, sample), advantage in zip(group.samples(), (-0.5, 0.5), strict=True):
        assert sample.ref_logprobs[2:].tolist() == pytest.approx([-10.02, -11.03, -12.04])
        assert sample.ref_kl_weight.tolist() == pytest.approx([0, 0, 0.01, 0.01, 0.01])
        assert sample.rl_weight.tolist() == [0, 0, 1, 1, 1] and sample.advantages[2:].tolist() == [advantage] * 3


def test_the_gradient_of_a_kl_penalty_is_that_of_the_divergence() -> None:
    """On fresh samples of every token, weighted by their probability, it is the gradient of KL(policy, reference)."""
    import torch

    from headway.core.batches import ComponentCounts
    from headway.trainer.losses.components import LossTokens, total_loss

    logits = torch.tensor([0.3, -1.0, 2.0, 0.5], dtype=torch.double, requires_grad=True)
    reference = torch.tensor([0.1, 0.4, 0.9, -0.7], dtype=torch.double).log_softmax(0)
    logprobs = logits.log_softmax(0)
    (wanted,) = torch.autograd.grad((logprobs.exp() * (logprobs - reference)).sum(), [logits])
    logprobs = logits.log_softmax(0)
    zero, old = torch.zeros(4).double(), logprobs.detach()
    tokens = LossTokens(zero.bool(), old, zero, zero, zero, 0.01 * old.exp(), reference, torch.zeros(4).long())
    loss, _ = total_loss(logprobs, zero, tokens, ComponentCounts(ref_kl=1), None)  # type: ignore[arg-type]
    (got,) = torch.autograd.grad(loss, [logits])
    torch.testing.assert_close(got, 0.01 * wanted)


def test_opsd_shows_the_demonstration_to_the_teacher_only(tmp_path: Path) -> None:
    save_tiny_tokenizer(tmp_path)
    renderer = load_renderer(tmp_path)
    prompt = renderer.render([Message("user", "abc")], generation_prompt=True).token_ids
    reply = renderer.encode("cba")
    trace = Trace(
        nodes=[
            Node(-1, prompt, Message("user", "abc")),
            Node(0, reply, Message("assistant", "cba"), [-1.0] * len(reply), [(0, len(reply))]),
        ]
    )
    group = make_group(trace, task=Task("t", {"demonstration": "xyz becomes zyx"}))

    async def use(url: str) -> None:
        context = Context(engines=lambda: [url], renderer=lambda: renderer)
        algorithm = make_algorithm(settings_of.Opsd(), context)
        await algorithm.query_references(group)
        algorithm.score(group)
        await algorithm.close()

    (body,) = with_server(ours, use)
    asked = body["token_ids"]
    assert asked[-len(reply) :] == reply
    assert "xyz becomes zyx" in renderer.decode(asked) and "abc" in renderer.decode(asked)
    (_, sample), *_ = group.samples()
    start = len(asked) - len(reply)
    expected = [-(token + (start + i) / 100) for i, token in enumerate(reply)]
    assert sample.ref_logprobs[sample.sampled].tolist() == pytest.approx(expected, rel=1e-5)
    assert (sample.ref_kl_weight == sample.sampled).all() and not sample.ref_logprobs[~sample.sampled].any()


def test_opsd_says_which_task_lacks_a_demonstration(tmp_path: Path) -> None:
    algorithm = Opsd(ReferenceModel(ReferenceSettings(base_url="http://127.0.0.1:1")), lambda: None, "solution")  # type: ignore[arg-type, return-value]
    with pytest.raises(HeadwayError, match="task t has no text under 'solution'"):
        asyncio.run(algorithm.query_references(make_group(make_trace(0.0))))


def test_sft_learns_the_teachers_tokens_and_nothing_else() -> None:
    teacher = ReferenceSettings(base_url="http://teacher:1", model="big")
    algorithm = make_algorithm(settings_of.Sft(teacher=teacher), Context())
    assert isinstance(algorithm, Sft) and algorithm.sampler == teacher and not algorithm.relative
    group = make_group(make_trace(1.0, prompt=2, reply=3))
    algorithm.score(group)
    (_, sample), *_ = group.samples()
    assert sample.ce_weight.tolist() == [0, 0, 1, 1, 1]
    assert not sample.rl_weight.any() and not sample.sampled.any() and set(sample.versions) == {-1}


def test_echo_adds_cross_entropy_on_chosen_roles() -> None:
    trace = make_trace(1.0, prompt=2, reply=3, turns=2)
    group = make_group(trace, make_trace(0.0, prompt=2, reply=3))
    make_algorithm(settings_of.Echo(roles={"tool": 0.1})).score(group)
    (_, first), (_, second) = group.samples()
    #                                    user  reply    tool       reply
    np.testing.assert_allclose(first.ce_weight, [0, 0, 0, 0, 0, 0.1, 0.1, 0, 0, 0], rtol=1e-6)
    assert not second.ce_weight.any()
    assert first.advantages[first.sampled].tolist() == [0.5] * 6 and (first.rl_weight == first.sampled).all()


def test_echo_counts_a_shared_observation_once() -> None:
    def reply(parent: int, token: int) -> Node:
        return Node(parent, [token], Message("assistant", "!"), [-1.0], [(0, 1)])

    nodes = [Node(-1, [1], Message("tool", "?")), reply(0, 2), reply(0, 3)]
    episode = Episode("e", "g", "env", Task("t"), traces=[Trace(nodes=nodes, reward=1.0)])
    assert len(episode_samples(episode)) == 2
    group = make_group(Trace(nodes=nodes, reward=1.0))
    make_algorithm(settings_of.Echo(roles={"tool": 0.5})).score(group)
    assert [sample.ce_weight.tolist() for _, sample in group.samples()] == [[0.5, 0.0], [0.0, 0.0]]


def test_a_reference_is_asked_again_until_it_answers_and_never_by_more_than_allowed_at_once() -> None:
    pauses: list[float] = []
    failures = iter([503, 429, 500])
    group = [[1, 2], [3, 4], [5, 6]]
    running = most = 0

    async def sleep(seconds: float) -> None:
        pauses.append(seconds)

    def flaky(body: dict[str, Any]) -> web.Response:
        status = next(failures, None)
        return web.Response(status=status, text="busy") if status else ours(body)

    async def use(url: str) -> None:
        nonlocal running, most
        model = ReferenceModel(ReferenceSettings(base_url=url, concurrency=2, retries=3), sleep=sleep)
        inner = model._ask

        async def counted(url: str, request: GenerateRequest) -> list[float]:
            nonlocal running, most
            running += 1
            most = max(most, running)
            try:
                return await inner(url, request)
            finally:
                running -= 1

        model._ask = counted  # type: ignore[method-assign]
        answers = await asyncio.gather(*(model.logprobs(tokens) for tokens in group))
        assert answers == [[0.0, pytest.approx(-(tokens[1] + 0.01))] for tokens in group]
        await model.close()

    bodies = with_server(flaky, use)
    assert len(bodies) == 6 and len(pauses) == 3 and most == 2


def test_a_reference_that_refuses_or_is_gone_is_reported_with_the_reason() -> None:
    async def sleep(seconds: float) -> None:
        pass

    async def refused(url: str) -> None:
        model = ReferenceModel(ReferenceSettings(base_url=url), sleep=sleep)
        with pytest.raises(HeadwayError, match="400: too long"):
            await model.logprobs([1, 2])
        await model.close()

    assert len(with_server(lambda body: web.Response(status=400, text="too long"), refused)) == 1

    async def gone() -> None:
        model = ReferenceModel(ReferenceSettings(base_url="http://127.0.0.1:9", retries=2), sleep=sleep)
        with pytest.raises(HeadwayError, match="gave no logprobs"):
            await model.logprobs([1, 2])
        await model.close()

    asyncio.run(gone())


@pytest.mark.parametrize(
    "reply",
    [{}, {"prompt_logprobs": None}, {"prompt_logprobs": [None]}, {"prompt_logprobs": [None, 3]},
     {"prompt_logprobs": [None, {"token_id": 7, "logprob": -1}]}],
)  # fmt: skip
def test_garbage_from_a_reference_is_an_error(reply: dict[str, Any]) -> None:
    with pytest.raises(HeadwayError, match="prompt_logprobs"):
        parse_prompt_logprobs(reply, [1, 2], "here")


def test_a_reply_of_a_reference_that_is_no_json_is_an_error() -> None:
    async def use(url: str) -> None:
        model = ReferenceModel(ReferenceSettings(base_url=url))
        with pytest.raises(HeadwayError, match=r"gave no logprobs: .* can't be read"):
            await model.logprobs([1, 2])
        await model.close()

    assert len(with_server(lambda body: web.Response(text="garbage"), use)) == 1


@pytest.mark.parametrize("settings", [settings_of.Opd(), settings_of.Sft(), settings_of.Opsd()])
def test_what_an_algorithm_lacks_is_named(settings: settings_of.Algorithm) -> None:
    with pytest.raises(UsageError, match="needs"):
        make_algorithm(settings, Context())


def test_every_kind_of_settings_has_an_algorithm() -> None:
    teacher = ReferenceSettings(base_url="http://teacher:1")
    context = Context(renderer=lambda: None)  # type: ignore[arg-type, return-value]
    kinds: list[settings_of.Algorithm] = [
        settings_of.Grpo(), settings_of.MaxRl(), settings_of.Rloo(), settings_of.ReinforcePp(), settings_of.Rae(),
        settings_of.HierarchicalGrpo(), settings_of.Opd(teacher=teacher), settings_of.Opsd(),
        settings_of.Sft(teacher=teacher), settings_of.Echo(),
    ]  # fmt: skip

    async def main() -> list[str]:
        return [type(make_algorithm(settings, context)).__name__ for settings in kinds]

    assert asyncio.run(main()) == [type(settings).__name__ for settings in kinds]
