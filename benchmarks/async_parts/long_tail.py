"""reverse-text whose episodes take as long as agents' do: mostly short, sometimes very long."""

import asyncio
import random
from typing import Any

from headway.core.episodes import Task
from headway.envs.base import Policy, State
from headway.envs.bundled.reverse_text import ReverseText


class LongTail(ReverseText):
    """After the model's reply an episode goes on for a log-normal time, as if the answer were tried out.

    `median` is in seconds, `sigma` the spread of the logarithm. The wait comes after the tokens, so that they grow
    stale while it lasts.
    """

    def __init__(self, *, median: float = 1.0, sigma: float = 1.0, **arguments: Any) -> None:
        super().__init__(**arguments)
        self._median, self._sigma = median, sigma

    async def run(self, task: Task, policy: Policy) -> State:
        state = await super().run(task, policy)
        await asyncio.sleep(self._median * random.lognormvariate(0.0, self._sigma))
        return state
