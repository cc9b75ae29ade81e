"""Tokenization of prompts: short ones at once, long ones in threads, so that the event loop serves everybody else."""

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

Answer = TypeVar("Answer")

_SHORT = 2**14
"""Bytes of a prompt that take less than a few milliseconds."""
LONG = _SHORT + 1
"""Bytes from which a prompt is tokenized in a thread."""
_THREADS = 2
"""Long prompts that are tokenized at a time: each needs memory of many times its size."""


class Tokenizing:
    def __init__(self) -> None:
        self._threads = ThreadPoolExecutor(_THREADS, thread_name_prefix="tokenize")

    async def run(self, size: int, work: Callable[[], Answer]) -> Answer:
        """Run `work` on a prompt of `size` bytes, in a thread where that is long."""
        if size <= _SHORT:
            return work()
        return await asyncio.get_running_loop().run_in_executor(self._threads, work)
