"""A trainer over several hosts: each starts its ranks when all have met at the run's control service, and starts them
anew, together with the others, when a rank or a host was lost."""

import logging
import os
import re
import time
from contextlib import suppress
from dataclasses import dataclass

import msgspec

from headway.base.addresses import own_address
from headway.base.errors import STOPPED, HeadwayError, PermanentError, UsageError
from headway.base.processes import free_port
from headway.core.control import GroupPlace, TrainerHost
from headway.launch.process import RestartBudget
from headway.trainer.parallel.group import POLL_SECONDS, end_ranks, exit_code, passing_on, start_ranks
from headway.transport.control.client import WAIT_SECONDS, ControlClient, own_name
from headway.transport.http_client import UnreachableError

logger = logging.getLogger(__name__)

HOSTS_HERE = "HEADWAY_TRAINER_NODES"
"""Set by a scheduler that knows how many hosts of the trainer it has started: they need not wait for more."""
_ASK_SECONDS = 0.5
_BEAT_SECONDS = 2.0
_FINAL = (0, STOPPED, UsageError.exit_code, PermanentError.exit_code)
"""Codes of ranks after which another start would not help, or is not wanted."""


@dataclass(frozen=True)
class HostCount:
    """The number of hosts of a trainer: `most`, or down to `fewest` where some do not come."""

    fewest: int
    most: int


def parse_hosts(text: str) -> HostCount:
    """Read `--hosts`: N, or MIN:MAX. Raises UsageError."""
    found = re.fullmatch(r"(?:(\d+):)?(\d+)", text)
    count = HostCount(int(found[1] or found[2]), int(found[2])) if found else HostCount(0, 0)
    if not 1 <= count.fewest <= count.most:
        raise UsageError(f"--hosts takes a number of hosts, or MIN:MAX (got {text!r})")
    return count


class TrainerHosts:
    """This host's ranks of the trainer of the run at `client`, each running `headway *argv`."""

    def __init__(self, client: ControlClient, hosts: HostCount, ranks: int, argv: list[str]) -> None:
        """`ranks` are those of all hosts together. Raises UsageError where hosts cannot share them evenly."""
        if ranks % hosts.most:
            raise UsageError(
                f"placement.trainer_ranks is {ranks}, which {hosts.most} hosts cannot share evenly; change one of them"
            )
        self._client, self._ranks, self._argv = client, ranks // hosts.most, argv
        here = int(os.environ.get(HOSTS_HERE, hosts.most))
        self.hosts = HostCount(hosts.fewest, min(max(here, hosts.fewest), hosts.most))

    def run(self) -> int:
        """Run until the ranks have done their work, are asked to stop, or keep dying; returns their exit code."""
        budget = RestartBudget()
        while True:
            host = self._host()
            place = self._meet(host)
            if place is None:
                return STOPPED
            began = time.monotonic()
            code = self._train(msgspec.structs.replace(host, attempt=place.attempt), place)
            if code in _FINAL:
                with suppress(HeadwayError):
                    self._client.leave_meeting(host)
                return code
            delay = budget.died(time.monotonic() - began, 0)
            if delay is None:
                return code
            logger.warning("the ranks of this host ended with code %d; they start again with all others", code)
            time.sleep(delay)

    def _host(self) -> TrainerHost:
        address = own_address(self._client.http.host)
        port = free_port(address)
        return TrainerHost(own_name(), time.time(), self._ranks, address, port, self.hosts.most, self.hosts.fewest)

    def _meet(self, host: TrainerHost) -> GroupPlace | None:
        """Wait for the other hosts; None when the run has ended. Raises HeadwayError where it does not answer."""
        logger.info("waiting for %d hosts at %s", self.hosts.most, self._client.http.url)
        heard = time.monotonic()
        while True:
            try:
                if place := self._client.meet(host):
                    return place
                if self._client.status().ended:
                    return None
                heard = time.monotonic()
            except UnreachableError as error:
                if time.monotonic() - heard > WAIT_SECONDS:
                    raise HeadwayError(f"{error}; is the run's `headway rl` up, and its control.port open?") from None
            time.sleep(_ASK_SECONDS)

    def _train(self, host: TrainerHost, place: GroupPlace) -> int:
        """Run this host's ranks until they have ended, or until the group has; returns their code."""
        last = place.first_rank + self._ranks - 1
        logger.info("attempt %d: ranks %d to %d of %d", place.attempt, place.first_rank, last, place.world_size)
        processes = start_ranks(self._ranks, self._argv, place)
        beat = time.monotonic()
        with passing_on(processes):
            while (code := exit_code(processes)) is None:
                if time.monotonic() - beat > _BEAT_SECONDS:
                    beat = time.monotonic()
                    if self._is_over(host):
                        logger.warning("another host of the trainer was lost or started anew")
                        end_ranks(processes, grace_seconds=0.0)  # they wait for ranks that are gone
                        return exit_code(processes) or 1
                time.sleep(POLL_SECONDS)
        return code

    def _is_over(self, host: TrainerHost) -> bool:
        try:
            return self._client.meet(host) is None
        except UnreachableError:
            return False  # the ranks go on while the service is away
