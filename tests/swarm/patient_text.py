"""An environment that blocks its process until a file is there, or crashes it: for tests of replays in processes."""

import os
import time
from pathlib import Path

from headway.core.episodes import Task
from headway.envs.bundled.reverse_text import ReverseText
from headway.envs.policy import Policy


class PatientText(ReverseText):
    """Reverse-text that says in `folder` that it was asked, and waits for `go` there. With `crashes`, it dies then."""

    def __init__(self, folder: str, crashes: bool = False) -> None:
        super().__init__(num_tasks=4)
        self._folder, self._crashes = Path(folder), crashes

    async def run(self, task: Task, policy: Policy) -> object:
        (self._folder / "asked").touch()
        give_up = time.monotonic() + 200
        while not (self._folder / "go").exists() and time.monotonic() < give_up:
            time.sleep(0.01)  # noqa: ASYNC251 - as code of environments may
        if time.monotonic() >= give_up:
            raise TimeoutError("nobody let it go on")
        if self._crashes:
            os._exit(1)
        return await super().run(task, policy)
