"""reverse-text whose episodes take as long as agents' do: mostly short, sometimes very long."""

import asyncio
import random
from typing import Any

from headway.core.episodes import Task
from headway.envs.base import Policy, State
from headway.envs.bundled.reverse_text import ReverseText


class LongTail(ReverseText):
    """Before it calls the model, an episode waits for a log-normal time with this median, in seconds."""

    def __init__(self, *, median: float = 1.0, sigma: float = 1.0, **arguments: Any) -> None:
        super().__init__(**arguments)
        self._median, self._sigma = median, sigma

    async def run(self, task: Task, policy: Policy) -> State:
        await asyncio.sleep(self._median * random.lognormvariate(0.0, self._sigma))
        return await super().run(task, policy)
