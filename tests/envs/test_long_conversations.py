"""Turns late in a conversation cost what early ones do: tokens and messages travel, and are read, once."""

import asyncio
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from relay import Relay, assert_tokens_are_what_was_sent, relay

from headway.core import prefixes
from headway.core.episodes import Episode, EpisodeRequest, Task
from headway.core.growing import Growing
from headway.core.messages import Message
from headway.core.openai.requests import RequestError
from headway.core.prefixes import PrefixSummary, PromptNames, root_hash
from headway.core.protocol import Continued, GenerateRequest, SamplingParams
from headway.envs.agents.apis import chat
from headway.envs.agents.apis.call import Kept
from headway.envs.base import ToolUse, tool
from headway.envs.engines.engines import Engines
from headway.envs.episodes import EpisodeRunner
from headway.envs.samples import episode_samples
from headway.inference.server.conversations import Conversations
from headway.models.tiny_tokenizer import tiny_tokenizer
from headway.rendering.chatml import ChatMLRenderer

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))
from turn_parts.server import REPLY, logprob, serving

TURNS = 16


class Pages(ToolUse):
    max_turns = TURNS

    def tasks(self):
        return [Task("0")]

    def prompt(self, task):
        return "go"

    @tool
    async def look(self, page: int) -> str:
        return f"page {page:02d}"


def play(tamper=bytes) -> tuple[Episode, Relay]:
    async def main():
        engines = Engines()
        async with serving() as port, relay(f"http://127.0.0.1:{port}") as kept:
            kept.tamper = tamper
            runner = EpisodeRunner(Pages(), "pages", ChatMLRenderer(tiny_tokenizer()), engines)
            sampling = SamplingParams(max_tokens=REPLY)
            episode = await runner.run(EpisodeRequest("e", "g", Task("0"), [kept.url], sampling=sampling))
            await engines.close()
        return episode, kept

    episode, kept = asyncio.run(main())
    assert episode.error is None, episode.error
    return episode, kept


@pytest.fixture(scope="module")
def played() -> tuple[Episode, Relay]:
    return play()


def test_a_late_turn_sends_what_an_early_one_does(played):
    episode, kept = played
    (sample,) = episode_samples(episode)
    requests = [msgspec.json.decode(body, type=GenerateRequest) for body in kept.bodies]
    assert len(requests) == TURNS
    assert [request.continues is not None for request in requests] == [False] + [True] * (TURNS - 1)
    assert len({len(request.token_ids) for request in requests[1:]}) == 1
    assert len(kept.bodies[-1]) - len(kept.bodies[1]) < 64
    assert sum(len(request.token_ids) for request in requests) + int(sample.sampled.sum()) == len(sample)


def test_what_the_engine_saw_is_what_is_trained(played):
    episode, kept = played
    assert_tokens_are_what_was_sent([episode], kept)


def test_an_engine_that_has_forgotten_gets_all_tokens(played):
    def tamper(body: bytes) -> bytes:
        request = msgspec.json.decode(body, type=GenerateRequest)
        if request.continues is not None and len(seen) % 4 == 3:
            request.continues = Continued("forgotten", request.continues.tokens)
        seen.append(request)
        return msgspec.json.encode(request)

    seen: list[GenerateRequest] = []
    episode, kept = play(tamper)
    assert kept.statuses.count(409) >= 3
    assert kept.statuses.count(200) == TURNS
    assert_tokens_are_what_was_sent([episode], kept)
    expected, found = episode_samples(played[0])[0], episode_samples(episode)[0]
    assert found.token_ids.tolist() == expected.token_ids.tolist()


def test_a_server_hands_a_conversation_on_from_request_to_request():
    kept = Conversations()
    first = kept.keep(GenerateRequest([1, 2]), [3], capacity=10)
    following = GenerateRequest([4, 5], continues=Continued(first, 3))
    assert kept.resume(following) == 3
    assert following.token_ids == [1, 2, 3, 4, 5]
    second = kept.keep(following, [6], capacity=10)
    assert kept.tokens == 6
    with pytest.raises(RequestError, match="send all of them"):
        kept.resume(GenerateRequest([4], continues=Continued(first, 3)))
    part = GenerateRequest([7], continues=Continued(second, 2))
    assert kept.resume(part) == 2
    assert part.token_ids == [1, 2, 7]


def test_a_server_keeps_no_more_than_its_capacity_and_no_one_elses_salt():
    kept = Conversations()
    assert kept.keep(GenerateRequest([1] * 9), [1, 1], capacity=10) is None
    first, second, _ = [kept.keep(GenerateRequest([1, 2, 3]), [4], capacity=10) for _ in range(3)]
    assert kept.tokens == 8
    refused = [
        GenerateRequest([5], continues=Continued(first, 4)),
        GenerateRequest([5], continues=Continued(second, 4), cache_salt="other"),
        GenerateRequest([5], continues=Continued(second, 5)),
        GenerateRequest([5], continues=Continued(second, 0)),
    ]
    for request in refused:
        with pytest.raises(RequestError):
            kept.resume(request)
    assert kept.resume(GenerateRequest([5], continues=Continued(second, 4))) == 4


@given(st.lists(st.tuples(st.integers(0, 5), st.lists(st.integers(), max_size=3)), max_size=12))
def test_what_grows_from_a_shared_sequence_leaves_it_as_it_was(steps):
    found: list[tuple[Growing[int], list[int]]] = [(Growing(), [])]
    for parent, items in steps:
        grown, plain = found[parent % len(found)]
        found.append((grown.extended(items), [*plain, *items]))
    for grown, plain in found:
        assert list(grown) == plain
        assert len(grown) == len(plain)
        assert grown[-2:] == plain[-2:]
        assert grown.begins([*plain, 1])
        assert not plain or grown[-1] == plain[-1]
        assert not plain or not grown.begins(plain[:-1])


def test_a_chat_that_repeats_its_messages_has_each_read_once(monkeypatch):
    read: list[object] = []
    original = chat.read_messages
    monkeypatch.setattr(chat, "read_messages", lambda messages: read.extend(messages) or original(messages))
    kept, messages = Kept(), []
    for turn in range(10):
        messages += [{"role": "user", "content": f"ask {turn}"}, {"role": "assistant", "content": f"say {turn}"}]
        body = msgspec.json.encode({"messages": messages})
        found = chat.ChatCall.read(body, kept).conversation(lambda message: message)
        assert found == [Message(m["role"], m["content"]) for m in messages]
    assert len(read) == len(messages)


def test_a_conversation_hashes_each_token_once_and_finds_what_is_cached(monkeypatch):
    hashed: list[int] = []
    original = prefixes.chain_hash
    monkeypatch.setattr(prefixes, "chain_hash", lambda parent, ids: hashed.extend(ids) or original(parent, ids))
    root, tokens, names = root_hash("weights"), list(range(4000)), PromptNames()
    whole = PromptNames().of(tokens, root, 4)
    assert len(hashed) == 3996
    hashed.clear()
    for end in range(40, 4001, 40):
        names = PromptNames(names)
        assert names.of(tokens[:end], root, 4)[:] == whole[: (end - 1) // 4]
    assert len(hashed) == 3996
    for held in (0, 1, 2, 500, 999):
        summary = PrefixSummary.of(whole[:held], 4, {"policy": root})
        assert 0 <= summary.count_cached(tokens, "policy", names) - 4 * held <= 8


def test_a_reply_that_takes_too_long_ends_the_episode_and_what_was_said_stays():
    async def main() -> Episode:
        engines = Engines()
        async with serving() as port, relay(f"http://127.0.0.1:{port}") as kept:
            kept.hold_after = 3
            renderer = ChatMLRenderer(tiny_tokenizer())
            runner = EpisodeRunner(Pages(), "pages", renderer, engines, turn_timeout=0.5)
            episode = await runner.run(EpisodeRequest("e", "g", Task("0"), [kept.url]))
            await engines.close()
        return episode

    episode = asyncio.run(main())
    assert episode.error is not None
    assert (episode.error.kind, episode.error.message) == ("timeout", "a reply took longer than 0.5 s")
    assert sum(node.sampled for node in episode.traces[0].nodes) <= 3


@pytest.mark.slow
def test_a_long_episode_goes_on_elsewhere_when_the_engine_that_keeps_it_is_killed():
    server = Path(__file__).parents[2] / "benchmarks" / "turn_parts" / "server.py"
    servers: dict[str, subprocess.Popen[str]] = {}
    for _ in range(2):
        process = subprocess.Popen([sys.executable, server], stdout=subprocess.PIPE, text=True)
        assert process.stdout is not None
        servers[f"http://127.0.0.1:{int(process.stdout.readline())}"] = process

    class Killing(Pages):
        async def ask(self, state, policy):
            if state.turn == TURNS // 2:
                holder = policy.tree._conversations[-1].kept_by
                assert holder is not None
                servers[holder.url].kill()
            return await super().ask(state, policy)

    async def main() -> Episode:
        engines = Engines()
        runner = EpisodeRunner(Killing(), "pages", ChatMLRenderer(tiny_tokenizer()), engines)
        episode = await runner.run(EpisodeRequest("e", "g", Task("0"), list(servers)))
        await engines.close()
        return episode

    try:
        episode = asyncio.run(main())
    finally:
        for process in servers.values():
            process.kill()
            process.wait()
    assert episode.error is None, episode.error
    (sample,) = episode_samples(episode)
    places = sample.sampled.nonzero()[0].tolist()
    assert len(places) == TURNS * REPLY
    assert [float(sample.logprobs[i]) for i in places] == pytest.approx(
        [logprob(int(sample.token_ids[i]), i) for i in places]
    )
