"""A leash from child to parent: when the parent is gone, however it went, the child ends too."""

import os
import signal
import sys
import threading
import time

LEASH = "HEADWAY_LEASH"
_PR_SET_PDEATHSIG = 1


def leashed_environment() -> dict[str, str]:
    """What to add to a child's environment so that `tie_to_parent` takes effect in it."""
    return {LEASH: "1"}


def tie_to_parent() -> None:
    """End this process with its parent if it was started with a leash. Call once, early."""
    if LEASH not in os.environ:
        return
    parent = os.getppid()
    if sys.platform == "linux":
        import ctypes

        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent or parent == 1:
            os._exit(1)
    else:
        threading.Thread(target=_watch, args=(parent,), daemon=True).start()


def leashed_command(argv: list[str]) -> list[str]:
    """`argv` of a program that isn't ours, so that it ends with its parent, too. Linux alone remembers that."""
    return [sys.executable, "-m", "headway.launch.leash", *argv]


def _watch(parent: int) -> None:
    while os.getppid() == parent:
        time.sleep(0.5)
    os._exit(1)


if __name__ == "__main__":
    tie_to_parent()
    os.execvp(sys.argv[1], sys.argv[1:])
