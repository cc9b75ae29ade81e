"""Long episodes whose worker is killed: they go on after the replies they have had, or are counted with the reason."""

import asyncio
import os
import signal
from collections.abc import Callable
from pathlib import Path

import pytest
from pool_environments import Count, CountDifferently
from scripted_engine import TOKENIZER, ScriptedEngine, serving, tiny_model
from test_pool_processes import ENVIRONMENTS

from headway.config.context import ContextRule, DropOld
from headway.config.orchestrator import EnvSettings, WorkerSettings
from headway.core.episodes import Episode, EpisodeRequest, Task
from headway.core.messages import Message
from headway.envs.base import Environment, Game
from headway.envs.engines.engines import Engines
from headway.envs.episodes import EpisodeRunner
from headway.envs.reply_log import ReplyLog
from headway.envs.samples import episode_samples
from headway.envs.workers.kept_replies import KeptReplies
from headway.envs.workers.pool import EnvPool
from headway.rendering.chatml import ChatMLRenderer

TURNS, KILLED_AT = 40, 20


def call(number: int) -> str:
    return f'<tool_call>\n{{"name": "add", "arguments": {{"n": {number}}}}}\n</tool_call>'


class Killer:
    """An engine whose policy counts up to TURNS, and that kills the pool's worker in place of its reply number
    `at`. Later replies are of a later version. `late` is after the episode's time."""

    def __init__(self, at: int = KILLED_AT, late: bool = False) -> None:
        self.late = late
        self.engine = ScriptedEngine(self._reply, context=1 << 16)
        self.kill: Callable[[], None] = lambda: None
        self.at = at
        self.replies = 0
        self.unheard: list[int] = []

    def _reply(self, request, prompt: str) -> str:
        if self.replies == self.at and not self.unheard:
            self.unheard.append(len(self.engine.sent))
            self.kill()
            self.engine.version += 1
            return "nobody hears this"
        self.replies += 1
        return call(self.replies) if self.replies < TURNS else "done"

    def heard(self) -> list:
        return [choice for index, choice in enumerate(self.engine.sent) if index not in self.unheard]


def play(name: str, killer: Killer, tmp_path: Path, **data) -> tuple[Episode, EnvPool]:
    """Play one episode in a pool, whose worker is killed."""

    async def main() -> tuple[Episode, EnvPool]:
        settings = EnvSettings(id=f"{ENVIRONMENTS}:{name}", name="count", workers=WorkerSettings(max=1))
        async with serving(killer.engine) as url:
            pool = EnvPool(settings, model=tiny_model(tmp_path))
            await pool.start()
            killer.kill = lambda: os.kill(pool._workers[0].pid, signal.SIGKILL)
            try:
                episode = await pool.run(EpisodeRequest("e", "g", Task("0", data), [url], timeout=100.0))
                assert pool._kept.bytes == 0, "replies are kept after their episode"
                return episode, pool
            finally:
                await pool.close()

    return asyncio.run(main())


def play_here(environment: Environment, killer: Killer, context: ContextRule | None = None) -> Episode:
    """Play one episode without a pool: it is cancelled where its worker would be killed, and goes on by its log."""

    async def main() -> Episode:
        engines, kept = Engines(), []
        runner = EpisodeRunner(environment, "count", ChatMLRenderer(TOKENIZER), engines, context)
        async with serving(killer.engine) as url:
            request = EpisodeRequest("e", "g", Task("0"), [url], timeout=100.0)
            first = asyncio.create_task(runner.run(request, ReplyLog(keep=kept.append)))
            killer.kill = first.cancel
            assert (await first).error.kind == "cancelled" and len(kept) == killer.at
            episode = await runner.run(request, ReplyLog(kept), spent=1000.0 if killer.late else 1.0)
            await engines.close()
        return episode

    return asyncio.run(main())


def assert_sampled_once(episode: Episode, killer: Killer) -> None:
    """The samples have each token that the episode was sent, once, with its logprob and version."""
    expected = [
        (token, entry.logprob, version)
        for choice in killer.heard()
        for token, entry, version in zip(
            choice.token_ids,
            choice.logprobs.content,
            [version for version, count in choice.versions for _ in range(count)],
            strict=True,
        )
    ]
    found = []
    for sample in episode_samples(episode):
        streams = (sample.token_ids, sample.logprobs, sample.versions)
        found += list(zip(*(stream[sample.sampled].tolist() for stream in streams), strict=True))
    assert [(token, version) for token, _, version in found] == [(token, version) for token, _, version in expected]
    assert [logprob for _, logprob, _ in found] == pytest.approx([logprob for _, logprob, _ in expected], abs=1e-6)


def test_an_episode_goes_on_in_another_worker_with_each_token_once(tmp_path: Path) -> None:
    killer = Killer()
    episode, pool = play("Count", killer, tmp_path)
    assert episode.error is None
    assert (pool.restarts, pool.resumed) == (1, 1)
    assert episode.reward == sum(range(TURNS)), "the state is not what all turns lead to"
    assert len(killer.heard()) == TURNS and len(killer.engine.requests) == TURNS + 1, "turns were sampled again"
    (sample,) = episode_samples(episode)
    assert_sampled_once(episode, killer)
    assert set(sample.versions[sample.sampled].tolist()) == {3, 4}
    # The prompt of turn 21 is the one that the killed worker had sent, token by token.
    before, after = (killer.engine.requests[KILLED_AT + i].token_ids for i in (0, 1))
    assert before == after and len(TOKENIZER.decode(after)) > 500
    assert "the sum is 190" in TOKENIZER.decode(after)


def test_a_conversation_that_a_rule_shortens_goes_on_too() -> None:
    killer = Killer()
    episode = play_here(Count(), killer, DropOld(above=200, turns=2))
    assert episode.error is None
    assert episode.traces[0].metrics["context_rewrites"] > 2
    assert_sampled_once(episode, killer)


def test_a_game_of_two_players_goes_on_too() -> None:
    class Count(Game):
        max_moves = TURNS

        def tasks(self) -> list[Task]:
            return [Task("0")]

        def turn(self, state) -> str:
            return self.players[state.turn % 2]

        def observe(self, state, player: str) -> str:
            return f"you are {player}, this is move {state.turn}"

        def move(self, state, player: str, reply: Message) -> None:
            state.said = [*getattr(state, "said", []), (player, reply)]

        def scores(self, state) -> dict[str, float]:
            return {player: float(sum(mover == player for mover, _ in state.said)) for player in self.players}

    killer = Killer()
    episode = play_here(Count(), killer)
    assert episode.error is None and len(killer.engine.requests) == TURNS + 1
    assert [trace.reward for trace in episode.traces] == [TURNS / 2, TURNS / 2]
    sampled = sum(int(sample.sampled.sum()) for sample in episode_samples(episode))
    assert sampled == sum(len(choice.token_ids) for choice in killer.heard())


def test_the_time_limit_holds_for_both_workers_together() -> None:
    killer = Killer(late=True)
    assert play_here(Count(), killer).error.kind == "timeout"


def test_an_environment_that_cannot_go_on_is_counted_with_the_turn(tmp_path: Path) -> None:
    episode, pool = play("CountOnce", Killer(), tmp_path)
    assert episode.error is not None and episode.error.kind == "worker"
    assert episode.error.message.startswith(f'the worker died at turn {KILLED_AT}; environment "count"')
    assert pool.resumed == 0


def test_an_environment_that_does_not_repeat_itself_is_found_out() -> None:
    killer = Killer()
    error = play_here(CountDifferently(), killer).error
    assert error is not None and error.kind == "worker"
    assert "the prompt of turn 1 differs" in error.message
    assert len(killer.engine.requests) == KILLED_AT + 1, "it was sampled anew"


def test_an_environment_that_ends_before_it_did_is_found_out() -> None:
    class Impatient(Count):
        runs = 0

        def start(self, state) -> None:
            self.runs += 1
            self.max_turns = 100 if self.runs == 1 else 3
            super().start(state)

    error = play_here(Impatient(), Killer()).error
    assert error is not None and "it ended at turn 3, with 17 replies left" in error.message


def test_an_episode_that_kills_its_worker_again_is_given_up(tmp_path: Path) -> None:
    episode, pool = play("Count", Killer(at=-1), tmp_path, kills=7)
    assert episode.error is not None
    assert episode.error.message == "the worker died at turn 7, as the one before it did"
    assert (pool.restarts, pool.resumed) == (2, 1)


def test_replies_are_kept_up_to_a_size() -> None:
    kept = KeptReplies(max_bytes=100)
    for _ in range(3):
        kept.add(1, bytes(30))
    kept.add(2, bytes(5))
    kept.add(1, bytes(30))
    assert kept.all(1) is None and kept.turns(1) == 4 and kept.bytes == 5
    kept.add(1, bytes(1))
    assert kept.all(1) is None and kept.all(2) == [bytes(5)] and kept.all(3) == []
    kept.forget(2)
    kept.forget(1)
    assert kept.bytes == 0 and kept.turns(1) == 0


def test_what_can_go_on_says_so() -> None:
    from headway.envs.agents.agent import AgentProgram
    from headway.envs.mcp.environment import McpToolUse
    from headway.envs.swe.swe import Swe

    assert Count.resumable and Swe().resumable
    assert not (AgentProgram.resumable or McpToolUse.resumable or Swe(agent=["true"]).resumable)
