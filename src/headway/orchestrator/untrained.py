"""Episodes that no batch holds: the first few of each cause since the last batch are kept, for people to read."""

from collections.abc import Iterable

from headway.core.episodes import Episode
from headway.core.records import RolloutRecord, without_experts

KEPT = 4
"""Episodes of each environment and cause, per step."""


class UntrainedEpisodes:
    """A sample of what failed or was dropped. `changed` tells that there are more than were recorded last."""

    def __init__(self) -> None:
        self.changed = False
        self._kept: dict[tuple[str, str], list[Episode]] = {}

    def add(self, cause: str, env: str, episodes: Iterable[Episode]) -> None:
        """Keep episodes until there are enough of this cause."""
        kept = self._kept.setdefault((env, cause), [])
        for episode in episodes:
            if len(kept) == KEPT:
                return
            kept.append(without_experts(episode))
            self.changed = True

    def records(self, step: int) -> list[RolloutRecord]:
        """Describe what was kept while batch `step` was collected."""
        self.changed = False
        return [
            RolloutRecord(step, env, episode.group_id, episode.reward, episode, cause=cause)
            for (env, cause), episodes in self._kept.items()
            for episode in episodes
        ]
