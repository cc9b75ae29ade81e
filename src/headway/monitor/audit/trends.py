"""Detectors over the course of a run: reward against held-out tasks and second scorers, and policies that collapse."""

from collections import Counter

import numpy as np

from headway.core.runs import RunPaths
from headway.monitor.audit.course import Course, read_rounds
from headway.monitor.audit.finding import Finding, Level
from headway.monitor.audit.statistics import CAUTION, Association, associate, rise
from headway.monitor.audit.table import Floats, RolloutTable

SURE = 3.0
"""Standard errors that a comparison of two moments must exceed. There are only a few of these in a run, so chance has
fewer tries than among patterns."""
AGREED = 0.8
"""Share of groups without any difference in reward from which on little is learned."""
COLLAPSED = 0.6
"""Share of one and the same reply among those to different tasks."""
LONG_ENOUGH = 12
"""Characters of a reply that different tasks do not have in common by chance, as `yes` or `bet` are."""


def find_second_scorer(table: RolloutTable, course: Course) -> list[Finding]:
    """A score that is computed and never trained on falls, or knows nothing of the reward, while the reward rises."""
    found = []
    for name in sorted({name for row in table.rows for name in row.audits}):
        scores = np.array([row.audits.get(name, np.nan) for row in table.rows])
        known = RolloutTable(table.env, [row for row, score in zip(table.rows, scores, strict=True) if score == score])
        agree = associate(scores[~np.isnan(scores)], known)
        reward = change(course, f"reward/{table.env}/mean")
        score = change(course, f"env/{table.env}/audit/{name}")
        figures = {
            "change of the reward": reward.correlation,
            f"change of {name}": score.correlation,
            "correlation within groups": agree.correlation,
            "rollouts": float(len(known)),
        }
        apart = known.rewards >= np.quantile(known.rewards, 0.75) if len(known) else np.zeros(0, dtype=bool)
        low = scores[~np.isnan(scores)] <= np.nanmedian(scores) if len(known) else np.zeros(0, dtype=bool)
        level: Level
        if reward.sure > 0 and score.sure < 0:
            level, text = "problem", f"The reward rises while the second scorer, {name}, falls."
        elif _disagree(agree, known):
            level, text = "warning", f"Replies that the reward prefers are no better for the second scorer, {name}."
        else:
            continue
        found.append(
            Finding(
                level,
                "second_scorer",
                table.env,
                text,
                "Read the rollouts below, which earn much and score low, and mend the reward.",
                figures,
                known.examples(apart & low),
                strength=max(0.0, -agree.correlation),
            )
        )
    return found


def _disagree(agree: Association, table: RolloutTable) -> bool:
    """Tell whether there were rollouts enough to see a weak agreement, and there is none."""
    groups = int(table.groups.max()) + 1 if len(table) else 0
    free = len(table) - groups - 3
    return free > 0 and np.tanh(np.arctanh(min(agree.correlation, 0.999)) + CAUTION / np.sqrt(free)) < 0.3


def find_held_out(paths: RunPaths, course: Course) -> list[Finding]:
    """Held-out tasks are solved worse than before while the reward rises."""
    reward = change(course, "reward/mean")
    found = []
    for env, scores in read_rounds(paths.evaluations).items():
        steps = sorted(scores)
        best = max(steps[:-1], key=lambda step: np.mean([*scores[step].values()] or [0.0]), default=None)
        if best is None or reward.sure <= 0:
            continue
        tasks = [task for task in scores[best] if task in scores[steps[-1]]]
        fall = np.array([scores[best][task] - scores[steps[-1]][task] for task in tasks])
        # Every task is compared with itself; a task that is easy or hard is so both times.
        error = float(fall.std() / np.sqrt(len(fall))) if len(fall) > 1 else np.inf
        if len(fall) < 8 or fall.mean() - SURE * error <= 0 or fall.mean() < 0.05:
            continue
        figures = {
            f"held out at step {best}": float(np.mean([scores[best][task] for task in tasks])),
            f"held out at step {steps[-1]}": float(np.mean([scores[steps[-1]][task] for task in tasks])),
            "change of the reward": reward.correlation,
            "tasks": float(len(tasks)),
        }
        text = f"The reward rises while the evaluation {env} falls."
        remedy = "Compare its replies with those that are rewarded (`headway dash`): what was learned is not the task."
        found.append(Finding("problem", "held_out", env, text, remedy, figures, strength=1.0))
    return found


def change(course: Course, name: str) -> Association:
    """Say by how much a metric has changed from the first third of the steps to the last, and what of it is sure."""
    values = course.column(name)
    values = values[np.isfinite(values)]
    if len(values) < 9:
        return Association()
    third = len(values) // 3
    first, last = values[:third], values[-third:]
    error = float(np.sqrt(first.var(ddof=1) / third + last.var(ddof=1) / third)) if third > 1 else np.inf
    difference = float(last.mean() - first.mean())
    return Association(difference, float(np.copysign(max(0.0, abs(difference) - SURE * error), difference)))


def find_collapse(table: RolloutTable) -> list[Finding]:
    """Different tasks get one and the same reply, which they did not at first."""
    late = np.flatnonzero(table.late)
    replies = Counter(table.rows[i].reply for i in late if len(table.rows[i].reply) >= LONG_ENOUGH)
    if not replies or len(late) < 32:
        return []
    reply, count = replies.most_common(1)[0]
    same: Floats = np.array([row.reply == reply for row in table.rows], dtype=np.float64)
    tasks = table.tasks((same > 0) & table.late)
    if count / len(late) < COLLAPSED or tasks < 8 or rise(same, table.early, table.late).sure <= 0:
        return []
    figures = {"share of late rollouts": count / len(late), "tasks": float(tasks), "rollouts": float(len(table))}
    return [
        Finding(
            "warning",
            "collapse",
            table.env,
            f"{tasks} different tasks get one and the same reply: {reply[:60]!r}.",
            "Lower trainer.optim.lr, keep the policy near its start (orchestrator.kl), or take an earlier checkpoint.",
            figures,
            table.examples((same > 0) & table.late),
        )
    ]


def find_agreement(course: Course) -> list[Finding]:
    """Nearly all groups agree on their reward, so that nothing is learned from them."""
    dropped, episodes = course.column("dropped/zero_advantage"), course.column("episodes")
    last = slice(-max(4, len(episodes) // 4), None)
    share = float(np.nansum(dropped[last]) / max(1.0, float(np.nansum(episodes[last]))))
    if share < AGREED:
        return []
    reward = float(np.nanmean(course.column("reward/mean")[last]))
    return [
        Finding(
            "notice",
            "agreement",
            "",
            f"In {share:.0%} of the newest groups all rollouts have the same reward; nothing is learned from them.",
            "Choose tasks that the policy sometimes solves (`headway env filter`), or stop here if it solves them all.",
            {"share of episodes": share, "mean reward": reward},
        )
    ]
