"""What the adapters make of other packages: their scores, their games, their refusals."""

import asyncio
import os
import random
import subprocess
import sys
from collections.abc import Awaitable, Callable
from pathlib import Path

import psutil
import pytest

from headway.base.errors import UsageError
from headway.core.messages import Message, ToolCall
from headway.envs.adapters import require
from headway.envs.adapters import verifiers as verifiers_adapter
from headway.envs.adapters.reasoning_gym import ReasoningGym, demonstrations, extract_answer
from headway.envs.adapters.textarena import Table, TextArena, random_opponent
from headway.envs.adapters.verifiers import Verifiers
from headway.envs.policy import EpisodeFailure, ScriptedPolicy
from headway.envs.registry import load_environment
from headway.envs.rewards import score

TASKSETS = str(Path(__file__).parent / "tasksets")


@pytest.mark.parametrize("family", ["leg_counting", "chain_sum", "spell_backward", "number_sorting"])
def test_reasoning_gym_scores_its_own_answers(family: str) -> None:
    environment = ReasoningGym(dataset=family, num_tasks=3, seed=7)
    again = ReasoningGym(dataset=family, num_tasks=3, seed=7)
    for task in environment.tasks():
        right = environment._dataset[task.data["index"]]["answer"]
        assert environment.score(task, f"I think <answer>{right}</answer>") == 1.0
        assert environment.score(task, right) == 1.0
        assert environment.score(task, "<answer>?</answer>") < 1.0
        assert environment.prompt(task) == again.prompt(task)


@pytest.mark.parametrize(
    ("reply", "answer"),
    [
        ("<answer> 4 </answer>", "4"),
        ("<answer>3</answer> no, <answer>4</answer>.", "4"),
        (" 4\n", "4"),
        ("<answer>4", "<answer>4"),
        ("4</answer>", "4</answer>"),
    ],
)
def test_the_last_pair_of_tags_holds_the_answer(reply: str, answer: str) -> None:
    assert extract_answer(reply) == answer


def test_neighbouring_seeds_of_reasoning_gym_share_no_problems() -> None:
    def questions(seed: int) -> set[str]:
        environment = ReasoningGym(dataset="word_sorting", num_tasks=20, seed=seed)
        return {str(environment.prompt(task)) for task in environment.tasks()}

    assert not questions(0) & questions(1)


@pytest.mark.parametrize("wrong_share", [0.0, 0.5])
def test_reasoning_gym_demonstrations_are_of_the_quality_asked_for(wrong_share: float) -> None:
    rows = demonstrations(40, seed=3, wrong_share=wrong_share, dataset="word_sorting")
    environment = ReasoningGym(dataset="word_sorting", num_tasks=40, seed=3)
    scores = []
    for task, row in zip(environment.tasks(), rows, strict=True):
        assert row["messages"][:-1] == [message.to_openai() for message in environment.prompt(task)]
        scores.append(environment.score(task, row["messages"][-1]["content"]))
    assert scores.count(1.0) == 40 * (1 - wrong_share)
    assert (
        demonstrations(1, wrong_share=1.0, dataset="chain_sum", system=None)[0]["messages"][-1]["content"]
        .strip("-")
        .isdigit()
    )


def test_reasoning_gym_refuses_unknown_families_and_settings() -> None:
    with pytest.raises(UsageError, match='did you mean "leg_counting"'):
        ReasoningGym(dataset="leg_countin")
    with pytest.raises(UsageError, match="refuses its config"):
        ReasoningGym(dataset="leg_counting", config={"no_such_setting": 1})


def play(environment: TextArena, task: int, seed: int = 0) -> dict[str, tuple[float, list[str]]]:
    async def main() -> dict[str, tuple[float, list[str]]]:
        rng = random.Random(seed)
        policy = ScriptedPolicy(lambda _agent, messages: random_opponent(messages[-1].content, rng))
        chosen = environment.tasks()[task]
        state = await environment.run(chosen, policy)
        await score(environment.rewards(), chosen, [agent.trace for agent in policy.agents()], state)
        said = {}
        for agent in policy.agents():
            messages = [node.message.content for node in agent.trace.nodes if node.message]
            said[agent.trace.agent] = (agent.trace.reward, messages)
        return said

    return asyncio.run(main())


def test_games_against_oneself_are_zero_sum_and_repeat_with_their_seed() -> None:
    environment = TextArena(game="TicTacToe-v0")
    for task in range(3):
        played = play(environment, task, seed=task)
        assert set(played) == {"player_0", "player_1"}
        assert sum(reward for reward, _ in played.values()) == 0
        random.seed(task)  # what others draw from Python's generator must not reach the game
        assert play(environment, task, seed=task) == played


def test_conversations_grow_by_what_is_new() -> None:
    _, messages = play(TextArena(game="TicTacToe-v0"), 0)["player_0"]
    assert sum("You are Player 0" in message for message in messages) == 1
    assert all("Available Moves" in message for message in messages[::2])


def test_only_the_first_seat_is_the_policys_where_the_opponent_is_scripted() -> None:
    played = [play(TextArena(game="TicTacToe-v0", opponent="random"), task, seed=task) for task in range(8)]
    assert {agent for game in played for agent in game} == {"player_0"}
    assert {game["player_0"][0] for game in played} >= {-1.0, 1.0}


def test_games_that_deal_cards_do_not_disturb_each_other() -> None:
    def tables() -> list[tuple[Table, list[str]]]:
        return [(Table(TextArena(game="KuhnPoker-v0-short")._make(), 2, seed), []) for seed in (0, 1)]

    def step(table: Table, told: list[str]) -> None:
        if not table.over:
            told.append(table.observation())
            table.move(random_opponent(told[-1], table.rng))

    alone, together = tables(), tables()
    for table, told in alone:
        while not table.over:
            step(table, told)
    while not all(table.over for table, _ in together):
        for table, told in together:
            step(table, told)
            random.random()  # what others draw must not matter either
    assert [told for _, told in alone] == [told for _, told in together]
    assert alone[0][1] != alone[1][1]


@pytest.mark.parametrize(
    ("args", "reason"),
    [
        ({"game": "NoSuchGame-v0"}, "has no game"),
        ({"game": "Hangman-v0"}, "word lists of nltk"),
        ({"game": "TicTacToe-v0", "opponent": "nobody"}, "neither"),
        ({"game": "TicTacToe-v0", "config": {"nonsense": 1}}, "cannot be played here"),
    ],
)
def test_textarena_says_why_a_game_cannot_be_played(args: dict[str, str], reason: str) -> None:
    with pytest.raises(UsageError, match=reason):
        load_environment("textarena", args)


def test_a_missing_package_is_said_with_what_to_install() -> None:
    with pytest.raises(UsageError, match=r"pip install reasoning-gym==[\d.]+ textarena=="):
        require("no_such_module", "no-such-package", "environments")
    with pytest.raises(UsageError, match="this adapter knows 9"):
        require("aiohttp", "aiohttp", "fancy", exactly="9")


def test_another_version_of_verifiers_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(verifiers_adapter, "VERSION", "0.0.1")
    with pytest.raises(UsageError, match=r"this adapter knows 0\.0\.1"):
        Verifiers(taskset="any")


@pytest.fixture
def tasksets(monkeypatch: pytest.MonkeyPatch) -> None:
    """The tasksets of this folder, as if they were installed: here, in the server and in its tool servers."""
    monkeypatch.syspath_prepend(TASKSETS)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(filter(None, [TASKSETS, os.environ.get("PYTHONPATH", "")])))


def with_verifiers(taskset: str, use: Callable[[Verifiers], Awaitable[None]]) -> None:
    async def main() -> None:
        environment = Verifiers(taskset=taskset)
        try:
            await environment.open()
            await use(environment)
        finally:
            await environment.close()

    asyncio.run(main())


@pytest.mark.slow
@pytest.mark.usefixtures("tasksets")
def test_tools_of_a_taskset_run_in_the_servers_that_it_brings() -> None:
    seen: list[list[Message]] = []

    def add(_agent: str, messages: list[Message]) -> str | Message:
        seen.append(messages)
        if messages[-1].role == "tool":
            return messages[-1].content
        return Message("assistant", tool_calls=(ToolCall("c", "math_add", '{"a": 40, "b": 1}'),))

    async def use(environment: Verifiers) -> None:
        policy = ScriptedPolicy(add)
        await environment.run(environment.tasks()[1], policy)
        assert (policy.trace.reward, policy.trace.rewards) == (1.0, {"correct": 1.0})
        assert seen[1][-1] == Message("tool", "41", tool_call_id="c", name="math_add")

    with_verifiers("tiny-tool-taskset", use)


@pytest.mark.slow
@pytest.mark.usefixtures("tasksets")
def test_a_server_that_dies_is_started_again_and_failures_of_the_engine_come_through() -> None:
    async def use(environment: Verifiers) -> None:
        assert environment._server is not None
        environment._server.kill()
        await environment._server.wait()
        right = ScriptedPolicy(["dcba"])
        await environment.run(environment.tasks()[0], right)
        assert (right.trace.reward, right.trace.metrics["reply_length"]) == (2.0, 4.0)

        def fail(_agent: str, _messages: list[Message]) -> str:
            raise EpisodeFailure("engine", "no engine answers")

        with pytest.raises(EpisodeFailure, match="no engine answers"):
            await environment.run(environment.tasks()[1], ScriptedPolicy(fail))

        def die(_agent: str, _messages: list[Message]) -> str:
            assert environment._server is not None
            environment._server.kill()
            return "too late"

        with pytest.raises(EpisodeFailure, match="server ended"):
            await environment.run(environment.tasks()[1], ScriptedPolicy(die))

    with_verifiers("tiny-reverse-taskset", use)


STARTER = """
import asyncio
from headway.envs.adapters.verifiers import Verifiers, _start_server

async def main():
    server, _ = await _start_server(Verifiers(taskset="tiny-reverse-taskset")._config)
    print(server.pid, flush=True)
    await server.wait()

asyncio.run(main())
"""


@pytest.mark.slow
@pytest.mark.usefixtures("tasksets")
def test_a_server_ends_with_whoever_started_it() -> None:
    starter = subprocess.Popen([sys.executable, "-c", STARTER], stdout=subprocess.PIPE, text=True)
    assert starter.stdout is not None
    server = psutil.Process(int(starter.stdout.readline()))
    starter.kill()
    starter.wait()
    _, alive = psutil.wait_procs([server], timeout=60)
    assert not alive


@pytest.mark.slow
@pytest.mark.usefixtures("tasksets")
def test_a_taskset_that_is_not_installed_is_one_line() -> None:
    with pytest.raises(UsageError, match='taskset "no-such-taskset" cannot be loaded'):
        Verifiers(taskset="no-such-taskset")
