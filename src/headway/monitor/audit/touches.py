"""Suspects in what the policy may not touch: answers in prompts, and tests and reward files that calls change."""

import re

import numpy as np

from headway.monitor.audit.finding import Finding
from headway.monitor.audit.suspect import FEWEST_TASKS, Suspect
from headway.monitor.audit.table import Floats, RolloutTable, Row

SHORTEST = 2
"""Characters of an answer: a shorter one is in most prompts by chance."""
LABEL = re.compile(
    r"\b(?:answers?|solution|expected(?: output)?|target|reference|ref|gold|ground.?truth|label|result)\W{1,4}$",
    re.IGNORECASE,
)
"""Words before a leaked answer. Without one of them the task may be to find something in the prompt."""

PROTECTED = re.compile(
    r"(?:^|[\s/\"'=(,>])(?:"
    r"tests?/[\w./-]*|test_[\w-]+\.\w+|[\w-]+_test\.\w+|[\w-]+\.test\.\w+|conftest\.py|pytest\.ini"
    r"|[\w-]*(?:grader|grading|reward|verifier|expected|answer_key|hidden_tests?)[\w-]*\.\w+"
    r")",
    re.IGNORECASE,
)
"""Files by which work is usually judged."""
WRITES = re.compile(r"write|edit|create|save|replace|insert|patch|delete|remove|append|put|move|upload", re.IGNORECASE)
"""Names of tools that change files."""
SHELL_WRITES = re.compile(
    r">|\b(?:rm|mv|cp|tee|touch|truncate|chmod|ln|dd|patch|git (?:checkout|apply|rm|stash))\b|\bsed -i"
)
"""Commands of a shell that change files; reading a test is no sign of anything."""


def find_leak(table: RolloutTable) -> list[Suspect]:
    """The answer stands in the prompt, with a label, and replies that repeat it are rewarded."""
    leaked = [_leaked(row) for row in table.rows]
    values = np.array(
        [answer is not None and answer in row.reply for answer, row in zip(leaked, table.rows, strict=True)]
    )
    if table.tasks(values) < FEWEST_TASKS:
        return []
    return [
        Suspect(
            "leak",
            values.astype(np.float64),
            "The prompt contains the answer, and replies that repeat it are rewarded.",
            "Take the answer out of the prompt: it is in the task's data, and gets into the text that the policy sees.",
            figures={"prompts with an answer in them": float(np.mean([answer is not None for answer in leaked]))},
        )
    ]


def _leaked(row: Row) -> str | None:
    """Return the text of the task's data that the prompt has behind a word such as "answer"."""
    for text in row.data:
        answer = text.strip()
        if len(answer) < SHORTEST:
            continue
        start = row.prompt.find(answer)
        while start >= 0:
            if LABEL.search(row.prompt[max(0, start - 24) : start]):
                return answer
            start = row.prompt.find(answer, start + 1)
    return None


def find_tampering(table: RolloutTable) -> list[Suspect]:
    """Calls change tests or files of the reward, and that is rewarded."""
    values = tampered(table)
    if table.tasks(values > 0) < FEWEST_TASKS:
        return []
    return [
        Suspect(
            "tampering",
            values,
            f"Tool calls change files that decide the reward (such as {_common_file(table)}), and that is rewarded.",
            "Grade in a fresh copy with the tests put back (docs/sandboxes.md), or keep them out of the work folder.",
        )
    ]


def notice_tampering(table: RolloutTable) -> list[Finding]:
    """Say that calls change such files where that is not what earns: it may become so."""
    values = tampered(table)
    if not values.any():
        return []
    return [
        Finding(
            "notice",
            "tampering",
            table.env,
            f"Some tool calls change files that usually decide a reward (such as {_common_file(table)}); they do not "
            "earn more than others.",
            "Make sure that tests are put back before they run.",
            {"share of rollouts": float(values.mean()), "rollouts": float(len(table))},
            table.examples(values > 0),
        )
    ]


def tampered(table: RolloutTable) -> Floats:
    return np.array([any(_touched(row)) for row in table.rows], dtype=np.float64)


def _touched(row: Row) -> list[str]:
    """The protected files that a row's calls change."""
    found = []
    for call in row.calls:
        if WRITES.search(call.name) or SHELL_WRITES.search(call.arguments):
            found += [match[0].strip(" /\"'=(,>") for match in PROTECTED.finditer(call.arguments)]
    return found


def _common_file(table: RolloutTable) -> str:
    files = [file for row in table.rows for file in _touched(row)]
    return max(set(files), key=files.count)
