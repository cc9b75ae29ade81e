"""Devices on simulated time: who computes on them, and how much slower when several do."""

import asyncio
from collections import deque
from heapq import heapify, heappop, heappush
from itertools import count
from typing import Protocol

from headway.plan.speeds import EngineSpeed

LONGEST_LEAP = 256
"""Tokens after which the time of a decode step is computed anew, as contexts have grown."""
ROUNDING = 1e-9


class User(Protocol):
    """Something that computes on a device."""

    single: bool
    """Whether it computes with one thread, however many others have."""

    @property
    def due(self) -> float | None:
        """Seconds of undisturbed work until something of it is done; None while there is none."""
        ...

    def worked(self, seconds: float) -> None:
        """So many seconds of its work are done, never more than were due."""
        ...


class Device:
    """A machine whose `users` compute with `threads` each, on `cores` of its own: all are slower while more threads are
    busy than there are cores."""

    def __init__(self, cores: float | None = None, threads: float = 1.0) -> None:
        self.busy_seconds: dict[int, float] = {}
        self._cores, self._threads = cores, threads
        self._users: list[User] = []
        self._since, self._slowdown = 0.0, 1.0
        self._timer: asyncio.TimerHandle | None = None

    def add(self, user: User) -> None:
        self._users.append(user)
        self.busy_seconds[id(user)] = 0.0

    def settle(self) -> None:
        """Count the work that was done up to now. Users call it before they change what they have to do."""
        now = asyncio.get_running_loop().time()
        passed, self._since = now - self._since, now
        if passed <= 0:
            return
        for user in self._users:
            if (due := user.due) is not None:
                self.busy_seconds[id(user)] += passed
                user.worked(min(passed / self._slowdown + ROUNDING, due))

    def schedule(self) -> None:
        """Look again when the next piece of work is done. Users call it after they changed what they have to do."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        dues = [due for user in self._users if (due := user.due) is not None]
        if not dues:
            return
        busy = sum(1.0 if user.single else self._threads for user in self._users if user.due is not None)
        self._slowdown = max(1.0, busy / self._cores) if self._cores else 1.0
        self._timer = asyncio.get_running_loop().call_later(min(dues) * self._slowdown, self._tick)

    def _tick(self) -> None:
        self._timer = None
        self.settle()
        self.schedule()


class SimulatedHost:
    """Orchestrator and environments, which compute beside the others. Nobody waits for them."""

    single = True

    def __init__(self, device: Device) -> None:
        self._device, self._left = device, 0.0
        device.add(self)

    @property
    def due(self) -> float | None:
        return self._left or None

    def worked(self, seconds: float) -> None:
        self._left = self._left - seconds if self._left - seconds > ROUNDING else 0.0

    def add(self, seconds: float) -> None:
        """Have more to compute."""
        if seconds > ROUNDING:
            self._device.settle()
            self._left += seconds
            self._device.schedule()


class SimulatedTrainer:
    """A trainer that computes one thing at a time."""

    single = False

    def __init__(self, device: Device) -> None:
        self._device, self._left = device, 0.0
        self._done = asyncio.Event()
        device.add(self)

    @property
    def due(self) -> float | None:
        return self._left or None

    def worked(self, seconds: float) -> None:
        self._left = self._left - seconds if self._left - seconds > ROUNDING else 0.0
        if not self._left:
            self._done.set()

    async def compute(self, seconds: float) -> None:
        """Compute what takes `seconds` on a device that nobody else uses."""
        if seconds <= ROUNDING:
            return
        self._device.settle()
        self._left = seconds
        self._done.clear()
        self._device.schedule()
        await self._done.wait()


class Reply:
    """A reply under way. `done` is set when its last token is there."""

    def __init__(self, prompt: int, context: int, tokens: int) -> None:
        self.prompt, self.context, self.tokens = prompt, context, tokens
        self.done = asyncio.Event()

    @property
    def longest(self) -> int:
        return self.context + self.tokens


class SimulatedEngine:
    """Continuous batching as a fluid: all running sequences get tokens at the same pace, and prompts stop them.

    A reply is admitted when the KV cache has room for all of it, so nothing is ever preempted.
    """

    single = False

    def __init__(self, speed: EngineSpeed, device: Device) -> None:
        self._speed, self._device = speed, device
        self._prompt_seconds = 0.0
        self._decoded = 0.0
        self._running: list[tuple[float, int, Reply]] = []
        self._waiting: deque[Reply] = deque()
        self._reserved = 0
        self._begun = 0.0
        self._order = count()
        device.add(self)

    @property
    def running(self) -> int:
        return len(self._running)

    @property
    def waiting(self) -> int:
        return len(self._waiting)

    @property
    def context(self) -> float:
        """Tokens of all running sequences."""
        return self._begun + self.running * self._decoded

    @property
    def kv_usage(self) -> float:
        return min(1.0, self.context / self._speed.kv_tokens)

    @property
    def busy_seconds(self) -> float:
        return self._device.busy_seconds[id(self)]

    @property
    def due(self) -> float | None:
        if self._prompt_seconds:
            return self._prompt_seconds
        if not self._running:
            return None
        tokens = min(self._running[0][0] - self._decoded, LONGEST_LEAP)
        return tokens * self._token_seconds()

    def worked(self, seconds: float) -> None:
        if self._prompt_seconds:
            left = self._prompt_seconds - seconds
            self._prompt_seconds = left if left > ROUNDING else 0.0
            return
        self._decoded += seconds / self._token_seconds()
        while self._running and self._running[0][0] <= self._decoded + ROUNDING:
            entry = heappop(self._running)
            self._ended(entry)
            entry[2].done.set()
        self._admit()

    async def generate(self, prompt: int, context: int, tokens: int) -> None:
        """Sample `tokens` after `context` tokens, of which `prompt` are new to the cache."""
        self._device.settle()
        reply = Reply(prompt, context, max(1, tokens))
        self._waiting.append(reply)
        self._admit()
        self._device.schedule()
        try:
            await reply.done.wait()
        except asyncio.CancelledError:
            self._abort(reply)
            raise

    def _abort(self, reply: Reply) -> None:
        self._device.settle()
        if reply in self._waiting:
            self._waiting.remove(reply)
        for entry in [entry for entry in self._running if entry[2] is reply]:
            self._running.remove(entry)
            heapify(self._running)
            self._ended(entry)
        self._admit()
        self._device.schedule()

    def _ended(self, entry: tuple[float, int, Reply]) -> None:
        end, _, reply = entry
        self._begun -= reply.longest - end
        self._reserved -= reply.longest

    def _admit(self) -> None:
        while self._waiting and self.running < self._speed.max_running:
            reply = self._waiting[0]
            if self.running and self._reserved + reply.longest > self._speed.kv_tokens:
                return
            self._waiting.popleft()
            self._reserved += reply.longest
            self._prompt_seconds += self._speed.prompt_seconds(reply.prompt)
            self._begun += reply.context - self._decoded
            heappush(self._running, (self._decoded + reply.tokens, next(self._order), reply))

    def _token_seconds(self) -> float:
        """Seconds of a decode step, halfway to the next look."""
        ahead = min(self._running[0][0] - self._decoded, LONGEST_LEAP) / 2
        return max(self._speed.step_seconds(self.running, self.context + self.running * ahead), ROUNDING)
