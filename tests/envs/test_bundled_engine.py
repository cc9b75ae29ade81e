"""Every bundled environment and adapter plays in the real pool against a real engine, and keeps its tokens."""

import asyncio
import os
from pathlib import Path
from typing import Any

import pytest
from relay import Relay, assert_tokens_are_what_was_sent, relay

from headway.config.orchestrator import EnvSettings, WorkerSettings
from headway.core.episodes import Episode, EpisodeRequest
from headway.core.protocol import SamplingParams
from headway.envs.samples import episode_samples
from headway.envs.workers.pool import EnvPool

HERE = Path(__file__).parent
EXAMPLE = HERE.parents[1] / "examples" / "any_agent"

AGENT = {
    "command": ["{python}", str(EXAMPLE / "agent.py"), "{word}"],
    "tasks": [{"word": "abcd"}, {"word": "hello"}],
    "reward": f"{EXAMPLE / 'reward.py'}:reward",
}


def play(engine: str, model: Path, id: str, args: dict[str, Any], episodes: int = 4) -> tuple[list[Episode], Relay]:
    async def main() -> tuple[list[Episode], Relay]:
        pool = EnvPool(EnvSettings(id=id, args=args, workers=WorkerSettings(max=1)), model=model, start_timeout=250.0)
        async with relay(engine) as kept:
            await pool.start()
            try:
                requests = [
                    EpisodeRequest(
                        f"e{i}",
                        "g",
                        pool.tasks[i % len(pool.tasks)],
                        [kept.url],
                        sampling=SamplingParams(max_tokens=6, seed=100 * i),
                        timeout=250.0,
                    )
                    for i in range(episodes)
                ]
                return list(await asyncio.gather(*map(pool.run, requests))), kept
            finally:
                await pool.close()

    return asyncio.run(main())


@pytest.mark.parametrize(
    ("id", "args", "agents"),
    [
        ("reverse-text", {}, {"policy"}),
        ("sort-words", {}, {"policy"}),
        ("calculator", {}, {"policy"}),
        ("wordle", {"guesses": 3}, {"policy"}),
        ("kuhn-poker", {}, {"first", "second"}),
        ("proposer-solver", {"solvers": 2}, {"proposer"}),
        ("needle", {"length": 300}, {"policy"}),
        ("reasoning-gym", {"dataset": "leg_counting"}, {"policy"}),
        ("textarena", {"game": "TicTacToe-v0", "opponent": "random"}, {"player_0"}),
        ("textarena", {"game": "KuhnPoker-v0"}, {"player_0", "player_1"}),
        ("agent", AGENT, {"policy"}),
    ],
)
def test_episodes_hold_exactly_the_tokens_that_the_engine_sent(
    engine: str, tiny: Path, id: str, args: dict[str, Any], agents: set[str]
) -> None:
    episodes, kept = play(engine, tiny, id, args, episodes=2 if id == "agent" else 4)
    assert [episode.error for episode in episodes] == [None] * len(episodes)
    assert {trace.agent for episode in episodes for trace in episode.traces} >= agents
    assert_tokens_are_what_was_sent(episodes, kept)
    for episode in episodes:
        sampled = sum(len(n.token_ids) for t in episode.traces for n in t.nodes if n.sampled)
        assert sum(int(sample.sampled.sum()) for sample in episode_samples(episode)) == sampled


def test_a_taskset_of_verifiers_runs_in_its_own_server(
    engine: str, tiny: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(
        "PYTHONPATH", os.pathsep.join([str(HERE / "tasksets"), *filter(None, [os.getenv("PYTHONPATH")])])
    )
    monkeypatch.setenv("PYTHONDONTWRITEBYTECODE", "1")
    episodes, kept = play(engine, tiny, "verifiers", {"taskset": "tiny-reverse-taskset", "config": {"words": 3}})
    assert [episode.error for episode in episodes] == [None] * len(episodes)
    assert_tokens_are_what_was_sent(episodes, kept)
    for episode in episodes:
        (trace,) = episode.traces
        reply = next(node.message.content for node in trace.nodes if node.sampled and node.message)
        answer = episode.task.data["answer"]
        share = sum(a == b for a, b in zip(reply, answer, strict=False)) / len(answer)
        assert trace.rewards == {"share": share}
        assert trace.reward == 2.0 * share
        assert trace.metrics["reply_length"] == len(reply)
