"""Episodes against an engine over HTTP: turns, tools, several agents, and everything that may go wrong in them."""

import asyncio

import msgspec
import pytest
from pool_environments import BadRewards, Duel, Echo, Tools
from scripted_engine import IM_END, TOKENIZER, ScriptedEngine, encode, serving

from headway.core.episodes import EpisodeRequest, RoutedExperts, Task
from headway.core.messages import Message
from headway.core.protocol import GenerateChoice, Logprobs, SamplingParams, TokenLogprob
from headway.envs.base import Environment, EpisodeFailure, Game, MultiTurn, State
from headway.envs.engines.engines import Engines
from headway.envs.episodes import EpisodeRunner
from headway.envs.rewards import conversation
from headway.envs.samples import episode_samples
from headway.rendering.chatml import ChatMLRenderer


def run(environment, engine, *, urls=(), task=None, **fields):
    """The outcome of one episode of `environment` against `urls` and then `engine`."""

    async def main():
        engines = Engines()
        async with serving(engine) as url:
            request = EpisodeRequest(
                "episode", "group", task or environment.tasks()[0], [*urls, url], timeout=20.0, version=3
            )
            request = msgspec.structs.replace(request, **fields)
            try:
                return await EpisodeRunner(environment, "env", ChatMLRenderer(TOKENIZER), engines).run(request)
            finally:
                await engines.close()

    return asyncio.run(main())


def call(name, arguments):
    return f'<tool_call>\n{{"name": "{name}", "arguments": {arguments}}}\n</tool_call>'


def in_order(*answers):
    script = iter(answers)
    return lambda request, prompt: next(script)


def test_what_the_engine_sent_is_what_the_episode_holds():
    ids = [119, 48, IM_END]
    logprobs = Logprobs([TokenLogprob(f"token_id:{t}", t, -0.25 * i) for i, t in enumerate(ids)])
    routed = RoutedExperts(b"\x00\x01\x02", (3, 1, 1), 5, "uint8")
    sent = GenerateChoice(0, ids, "stop", logprobs, [(3, 2), (4, 1)], routed)
    engine = ScriptedEngine(lambda request, prompt: sent)
    sampling = SamplingParams(temperature=0.7, stop_token_ids=(7,), max_tokens=9, seed=5)
    episode = run(Echo(), engine, sampling=sampling, priority=2, policy="adapter")
    node = episode.traces[0].nodes[-1]
    assert episode.reward == 1.0
    assert (node.token_ids, node.logprobs, node.versions) == (ids, [-0.0, -0.25, -0.5], [(3, 2), (4, 1)])
    assert node.routed_experts == routed
    assert (node.temperature, node.finish_reason) == (0.7, "stop")
    (asked,) = engine.requests
    assert asked.sampling_params.stop_token_ids == (7, *ChatMLRenderer(TOKENIZER).stop_token_ids)
    assert (asked.priority, asked.model) == (2, "adapter")
    assert (asked.sampling_params.max_tokens, asked.sampling_params.seed) == (9, 5)
    assert engine.headers[0]["X-Session-ID"] == "episode"
    sample, *_ = episode_samples(episode)
    assert sample.token_ids.tolist() == [*asked.token_ids, *ids]


def test_tools_are_told_called_and_answered_by_appending():
    engine = ScriptedEngine(in_order("I add." + call("add", '{"a": 2, "b": 3}'), "5"))
    episode = run(Tools(), engine)
    assert episode.error is None
    assert episode.traces[0].rewards == {"sums": 5.0}
    roles = [message.role for message in conversation(episode.traces[0])]
    assert roles == ["user", "assistant", "tool", "assistant"]
    first, second = engine.requests
    whole = [*first.token_ids, *engine.sent[0].token_ids]
    assert second.token_ids[: len(whole)] == whole
    prompt = TOKENIZER.decode(first.token_ids, skip_special_tokens=False)
    assert "add(a: integer, b: integer) Add two numbers." in prompt
    assert "state" not in prompt


@pytest.mark.parametrize(
    ("called", "told"),
    [
        (call("broken", "{}"), "error: RuntimeError: out of order"),
        (call("hanging", "{}"), "error: hanging took longer than 0.3 s"),
        (call("hanging_async", "{}"), "error: hanging_async took longer than 0.3 s"),
        (call("missing", "{}"), "error: there is no tool 'missing'"),
        (call("add", '{"a": "two", "b": 3}'), "error: Expected `int`, got `str`"),
        (call("add", '{"a": 1}'), "error: missing argument 'b'"),
        (call("add", '{"a": 1, "b": 2, "c": 3}'), "error: unknown argument 'c'"),
        (call("flood", "{}"), "characters left out]"),
    ],
)
def test_what_goes_wrong_in_a_tool_is_told_to_the_model(called, told):
    engine = ScriptedEngine(in_order(called, "oh"))
    episode = run(Tools(), engine)
    assert episode.error is None
    results = [message.content for message in conversation(episode.traces[0]) if message.role == "tool"]
    assert len(results) == 1
    assert told in results[0]
    assert len(results[0]) < 200


def test_a_malformed_call_is_an_answer_like_any_other():
    engine = ScriptedEngine(in_order("<tool_call>\n{oops}\n</tool_call>"))
    episode = run(Tools(), engine)
    assert episode.error is None
    assert len(engine.requests) == 1
    assert "oops" in conversation(episode.traces[0])[-1].content


@pytest.mark.parametrize("kind", ["raise", "nan", "text", "none", "infinite"])
def test_a_bad_reward_is_an_error_that_names_it(kind):
    episode = run(BadRewards(kind), ScriptedEngine(lambda request, prompt: "x"))
    assert episode.error.kind == "reward"
    assert "reward judged" in episode.error.message
    assert episode.traces[0].nodes, "what was said is kept"


def test_each_agent_has_its_own_trace_reward_and_problem():
    engine = ScriptedEngine(in_order("find x", "yes", "no"))
    episode = run(Duel(), engine)
    assert [(t.agent, t.reward, t.problem) for t in episode.traces] == [
        ("proposer", 0.5, None),
        ("solver", 1.0, "find x"),
        ("solver", 0.0, "find x"),
    ]
    assert episode.traces[0].rewards == {"made": 1.0}
    assert len(episode_samples(episode)) == 3


class Countdown(Game):
    """Players take turns to say anything; who is left without a turn wins."""

    def tasks(self):
        return [Task("0")]

    def start(self, state):
        state.left = 3

    def turn(self, state):
        return None if state.left == 0 else self.players[state.turn % 2]

    def observe(self, state, player):
        return f"{player}: {state.left} left"

    def move(self, state, player, reply):
        state.left -= 1

    def scores(self, state):
        return {"first": -1.0, "second": 1.0}


def test_a_game_gives_every_player_its_own_conversation_and_score():
    engine = ScriptedEngine(lambda request, prompt: "ok")
    episode = run(Countdown(), engine)
    assert [(t.agent, t.reward) for t in episode.traces] == [("first", -1.0), ("second", 1.0)]
    said = [[m.content for m in conversation(t)] for t in episode.traces]
    assert said == [["first: 3 left", "ok", "first: 1 left", "ok"], ["second: 2 left", "ok"]]


class Chatter(MultiTurn):
    """Goes on for ever, with ever more to read."""

    system = "talk"

    def tasks(self):
        return [Task("0")]

    def prompt(self, task):
        return {"role": "user", "content": "x" * task.data.get("size", 10)}

    async def respond(self, state: State, reply: Message):
        return [{"role": "user", "content": "y" * 40}]


def test_a_prompt_longer_than_the_context_is_an_error_of_its_own():
    engine = ScriptedEngine(lambda request, prompt: "x", context=100)
    episode = run(Chatter(), engine, task=Task("0", {"size": 200}))
    assert episode.error.kind == "context"
    assert "the context holds 100" in episode.error.message


def test_a_conversation_that_outgrows_the_context_ends_truncated():
    engine = ScriptedEngine(lambda request, prompt: "hm", context=160)
    episode = run(Chatter(), engine, sampling=SamplingParams(max_tokens=64))
    assert episode.error is None
    assert episode.traces[0].truncated
    assert [r.sampling_params.max_tokens for r in engine.requests][-1] < 64, "asked for what still fits"


def test_turns_are_limited_and_cut_off_replies_are_marked():
    chatter = Chatter()
    chatter.max_turns = 3
    engine = ScriptedEngine(lambda request, prompt: encode("abc"))
    episode = run(chatter, engine)
    assert len(engine.requests) == 3
    assert episode.traces[0].truncated
    assert len(episode.traces[0].branches()) == 1


def test_another_engine_takes_over_and_a_busy_one_is_asked_again():
    engine = ScriptedEngine(lambda request, prompt: "w0", fail=2)
    dead = "http://127.0.0.1:9"
    episode = run(Echo(), engine, urls=[dead])
    assert episode.error is None
    assert len(engine.requests) == 1


def test_no_engine_at_all_is_an_error(monkeypatch):
    monkeypatch.setattr("headway.envs.engines.sampler.RETRY_SECONDS", 0.3)
    engine = ScriptedEngine(lambda request, prompt: "w0", fail=10**9)
    assert run(Echo(), engine).error.kind == "engine"


def test_a_reply_that_was_aborted_is_asked_for_again():
    aborted = GenerateChoice(0, [97], "abort", Logprobs([TokenLogprob("", 97, -1.0)]))
    engine = ScriptedEngine(in_order(aborted, "w0"))
    episode = run(Echo(), engine)
    assert episode.error is None
    assert episode.traces[0].nodes[-1].token_ids == [*encode("w0"), IM_END]


def test_logprobs_are_not_optional():
    engine = ScriptedEngine(lambda request, prompt: GenerateChoice(0, [97, IM_END], "stop"))
    episode = run(Echo(), engine)
    assert episode.error.kind == "engine"
    assert "logprob" in episode.error.message


class Troubled(Environment):
    def tasks(self):
        return [Task("0")]

    async def run(self, task, policy):
        trouble = task.data["trouble"]
        await policy.chat("go", max_tokens=5, temperature=0.0)
        if trouble == "raise":
            raise ValueError("no board")
        if trouble == "own timeout":
            raise TimeoutError("theirs")
        if trouble == "failure":
            raise EpisodeFailure("tool", "sandbox is gone")
        if trouble == "slow":
            await asyncio.sleep(60)
        await policy.chat([{"role": "nobody", "content": "x"}])


@pytest.mark.parametrize(
    ("trouble", "kind", "message"),
    [
        ("raise", "environment", "ValueError: no board"),
        ("own timeout", "environment", "TimeoutError: theirs"),
        ("failure", "tool", "sandbox is gone"),
        ("slow", "timeout", "longer than 2 s"),
        ("bad message", "environment", "not a chat message"),
    ],
)
def test_errors_of_environments_are_data_and_keep_what_was_said(trouble, kind, message):
    engine = ScriptedEngine(lambda request, prompt: "x")
    timeout = 2.0 if trouble == "slow" else 60.0  # enough to ask the engine first
    episode = run(Troubled(), engine, task=Task("0", {"trouble": trouble}), timeout=timeout)
    assert episode.error.kind == kind
    assert message in episode.error.message
    assert len(episode.traces[0].nodes) == 3
    assert episode.traces[0].nodes[-1].temperature == 0.0
    assert [sample.temperature for sample in episode_samples(episode)] == [1.0]  # that of greedy tokens' logprobs
    assert engine.requests[0].sampling_params.max_tokens == 5
