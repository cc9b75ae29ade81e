"""An environment that does one bad thing in every episode, and else is a lottery."""

import math
import os
import signal
import subprocess
import sys
import time

from lottery import Lottery

from headway.envs.base import Task, reward

MEGABYTES = 5


class Hostile(Lottery):
    """`how` it misbehaves: hang, raise, fork, print, exit, crash, leak or nan."""

    def __init__(self, *, how: str) -> None:
        self.how = how

    def prompt(self, task: Task) -> str:
        match self.how:
            case "hang":
                time.sleep(3600)
            case "raise":
                raise LookupError("no such answer")
            case "fork":
                subprocess.Popen([sys.executable, "-c", "import time; time.sleep(3600)"], start_new_session=True)
                if not os.fork():
                    time.sleep(3600)
            case "print":
                print("x" * MEGABYTES * 2**20)
            case "exit":
                sys.exit(0)
            case "crash":
                os.kill(os.getpid(), signal.SIGSEGV)
            case "leak":
                self._leaked = [bytearray(2**28) for _ in range(1000)]
        return super().prompt(task)

    @reward
    def spoilt(self, answer: str) -> float:
        return math.nan if self.how == "nan" else 0.0
