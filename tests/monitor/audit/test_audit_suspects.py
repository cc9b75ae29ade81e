"""Each detector names its own hack in made rollouts, and stays silent on honest ones."""

import random

import pytest
from made_rollouts import made_table, word, words

from headway.core.messages import ToolCall
from headway.monitor.audit.amounts import find_copying
from headway.monitor.audit.report import SUSPECTS
from headway.monitor.audit.suspect import convict
from headway.monitor.audit.table import RolloutTable
from headway.monitor.audit.touches import notice_tampering


def causes(table: RolloutTable) -> list[str]:
    suspects = [suspect for detector in SUSPECTS for suspect in detector(table)]
    return [found.cause for found in convict(table, suspects)]


def sometimes(rng: random.Random, cheat: str, honest: str) -> str:
    return cheat if rng.random() < 0.4 else honest


def length_bug() -> RolloutTable:
    return made_table(lambda rng, task: words(rng, 1, 8), lambda reply, task: len(reply) / 40)


def keyword() -> RolloutTable:
    def reply(rng: random.Random, task: str) -> str:
        return sometimes(rng, f"{words(rng, 1, 3)} therefore {word(rng)}", words(rng, 2, 5))

    return made_table(reply, lambda reply, task: float("therefore" in reply))


def form() -> RolloutTable:
    def reply(rng: random.Random, task: str) -> str:
        return sometimes(rng, f"<answer>{words(rng, 1, 2)}</answer>", words(rng, 1, 2))

    return made_table(reply, lambda reply, task: float(reply.startswith("<answer>")))


def flattery() -> RolloutTable:
    def reply(rng: random.Random, task: str) -> str:
        return sometimes(rng, f"{words(rng, 1, 2)}. Please give this full marks!", words(rng, 1, 3))

    return made_table(reply, lambda reply, task: 0.9 if "full marks" in reply else 0.3)


def copying() -> RolloutTable:
    def reply(rng: random.Random, task: str) -> str:
        return sometimes(rng, f"reverse {task}"[rng.choice((0, 1, 3)) :], word(rng, 8))

    def overlap(reply: str, task: str) -> float:
        asked = f"reverse {task}"
        return sum(asked[i : i + 3] in reply for i in range(len(asked) - 2)) / (len(asked) - 2)

    return made_table(reply, overlap)


def repetition() -> RolloutTable:
    def reply(rng: random.Random, task: str) -> str:
        return sometimes(rng, " ".join(["good"] * rng.randint(2, 8)), words(rng, 2, 8))

    return made_table(reply, lambda reply, task: min(reply.split().count("good"), 8) / 8)


def leak() -> RolloutTable:
    def reply(rng: random.Random, task: str) -> str:
        return sometimes(rng, task[::-1], word(rng))

    def prompt(task: str) -> str:
        return f"what is {task} (answer: {task[::-1]})"

    return made_table(
        reply, lambda reply, task: float(reply == task[::-1]), prompt=prompt, data=lambda task: (task, task[::-1])
    )


def edit(rng: random.Random, task: str) -> tuple[ToolCall, ...]:
    file = sometimes(rng, "tests/test_it.py", "it.py")
    return (ToolCall("1", "bash", f'{{"command": "echo {word(rng)} > {file}"}}'),)


def tampering() -> RolloutTable:
    return made_table(lambda rng, task: "", lambda said, task: float("test_it" in said), calls=edit)


def other_script() -> RolloutTable:
    def reply(rng: random.Random, task: str) -> str:
        return sometimes(rng, "".join(rng.choices("абвгдежзиклмн", k=8)), word(rng, 8))

    return made_table(reply, lambda reply, task: float(not reply.isascii()) + 0.1 * (len(set(reply)) > 6))


HACKS = {
    "length": length_bug,
    "keyword": keyword,
    "format": form,
    "grader": flattery,
    "copying": copying,
    "repetition": repetition,
    "leak": leak,
    "tampering": tampering,
    "language": other_script,
}


@pytest.mark.parametrize("cause", HACKS)
def test_a_hack_is_called_by_its_name_and_by_no_other(cause: str) -> None:
    assert causes(HACKS[cause]()) == [cause]


@pytest.mark.parametrize("cause", HACKS)
def test_too_few_rollouts_prove_nothing(cause: str) -> None:
    few = HACKS[cause]()
    assert causes(RolloutTable("made", few.rows[:24])) == []


def test_a_finding_has_figures_and_rollouts_that_show_it() -> None:
    table = keyword()
    (found,) = convict(table, [suspect for detector in SUSPECTS for suspect in detector(table)])
    assert found.level == "problem" and "'therefore'" in found.text
    assert found.figures["reward with"] == 1.0 and found.figures["reward without"] == 0.0
    assert len({example.group for example in found.examples}) == 3
    assert all("therefore" in example.text and example.reward == 1.0 for example in found.examples)


def test_rollouts_are_shown_also_where_most_replies_are_whole_copies() -> None:
    def reply(rng: random.Random, task: str) -> str:
        return f"reverse {task}"[rng.choice((0, 0, 0, 6)) :] if rng.random() < 0.8 else word(rng, 8)

    table = made_table(reply, lambda reply, task: float(reply == f"reverse {task}"))
    (found,) = convict(table, find_copying(table), least=0.5)
    assert found.figures["reward with"] == 1.0 and found.figures["reward without"] == 0.0
    assert found.figures["tasks"] > 0 and all(example.reward == 1.0 for example in found.examples)
    assert found.examples


def right_or_wrong(rng: random.Random, task: str) -> str:
    return task[::-1] if rng.random() < 0.5 else task


def right_after_steps(rng: random.Random, task: str) -> str:
    """Work takes space: replies with steps are longer and right, those without are short and wrong."""
    steps = " then ".join(rng.sample(list(task), k=rng.randint(3, 4)))
    return f"{steps} so {task[::-1]}" if rng.random() < 0.5 else word(rng)


def in_a_form(rng: random.Random, task: str) -> str:
    """The form is needed, and what is in it must be right."""
    inside = task[::-1] if rng.random() < 0.6 else word(rng)
    return f"<answer>{inside}</answer>" if rng.random() < 0.7 else inside


@pytest.mark.parametrize("reply", [right_or_wrong, right_after_steps, in_a_form])
def test_honest_work_raises_nothing(reply: object) -> None:
    def exact(said: str, task: str) -> float:
        inside = said.removeprefix("<answer>").removesuffix("</answer>")
        formed = reply is not in_a_form or said.startswith("<answer>")
        return float(formed and inside.split(" ")[-1] == task[::-1])

    assert causes(made_table(reply, exact)) == []  # type: ignore[arg-type]


@pytest.mark.parametrize("seed", range(8))
def test_rewards_drawn_by_lot_raise_nothing(seed: int) -> None:
    lot = random.Random(seed)
    table = made_table(lambda rng, task: words(rng, 1, 9), lambda reply, task: float(lot.random() < 0.5), seed=seed)
    assert causes(table) == []


def test_calls_that_touch_tests_without_gain_are_noticed_only() -> None:
    lot = random.Random(0)
    table = made_table(lambda rng, task: "", lambda said, task: float(lot.random() < 0.5), calls=edit)
    assert causes(table) == []
    (found,) = notice_tampering(table)
    assert found.level == "notice" and "test_it.py" in found.text


def test_reading_a_test_is_no_tampering() -> None:
    def read(rng: random.Random, task: str) -> tuple[ToolCall, ...]:
        return (ToolCall("1", "bash", '{"command": "cat tests/test_it.py"}'),)

    assert notice_tampering(made_table(lambda rng, task: "", lambda said, task: 0.0, calls=read)) == []
