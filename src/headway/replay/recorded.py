"""Recorded episodes, by group: what engines and environments gave a run, as far as it was trained."""

from collections.abc import Sequence

from headway.core.episodes import Episode
from headway.core.journal import full_id
from headway.core.records import read_rollouts
from headway.core.runs import RunPaths
from headway.replay.lives import Life


class RecordedEpisodes:
    """The episodes of the groups that one life trained. Steps are read when they are needed, and then let go."""

    def __init__(self, paths: RunPaths, life: Life) -> None:
        self._paths = paths
        self._step_of = {
            full_id(life.prefix, group): formed.step for formed in life.formed() for group in formed.groups
        }
        self._steps: dict[int, dict[str, list[Episode]]] = {}

    def of_group(self, group_id: str) -> Sequence[Episode]:
        """Return the episodes that were scored, in order; none for a group that no batch has."""
        step = self._step_of.get(group_id)
        if step is None:
            return []
        if step not in self._steps:
            groups: dict[str, list[Episode]] = {}
            for record in read_rollouts(self._paths, step):
                groups.setdefault(record.group, []).append(record.episode)
            self._steps[step] = groups
        return self._steps[step].get(group_id, [])

    def forget(self, step: int) -> None:
        """Let go of the episodes up to this step."""
        for old in [known for known in self._steps if known <= step]:
            del self._steps[old]
