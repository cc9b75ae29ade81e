"""The hosts of a deployment, before a run: they meet at the address that the run will have, and try each other.

Every host runs the same command. What they tell each other goes through a store at that address, as JSON; what they
send to measure the network are tensors.
"""

import json
import os
import platform
import time
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from headway import __version__
from headway.base.addresses import is_own, own_address, own_interface
from headway.base.devices import query_gpus
from headway.base.errors import HeadwayError, UsageError
from headway.monitor.doctor.finding import Finding

if TYPE_CHECKING:
    from torch._C._distributed_c10d import TCPStore

MOST_SKEW = 2.0
"""Seconds by which clocks may differ: certificates and the order of log lines depend on them."""
_BYTES = 1 << 26
_REPEATS = 3


@dataclass(frozen=True)
class HostFacts:
    """Facts that a host tells about itself."""

    name: str
    address: str
    interface: str
    headway: str
    torch: str
    gpus: list[str]
    nccl: bool


def parse_address(text: str) -> tuple[str, int]:
    """Read HOST:PORT. Raises UsageError."""
    host, _, port = text.rpartition(":")
    if not host or not port.isdigit() or not 0 < int(port) < 65536:
        raise UsageError(f"--deployment takes the address that the run will have, HOST:PORT (got {text!r})")
    return host.strip("[]"), int(port)


def check_deployment(host: str, port: int, hosts: int, seconds: float) -> Iterator[Finding]:
    """Meet `hosts` hosts at `host`:`port`, which one of them owns, and yield what was found; the same on each."""
    own_address(host)  # says so where there is no way
    store, number = _meet(host, port, hosts, seconds)
    if number >= hosts:
        raise HeadwayError(f"{hosts} hosts are at {host}:{port} already; give --hosts their number on all of them")
    _put(store, f"facts/{number}", vars(_own_facts(host)))
    facts, missing = _gather(store, hosts, seconds)
    if missing:
        came = ", ".join(fact.name for fact in facts)
        text = f"{len(facts)} of {hosts} came to {host}:{port} within {seconds:.0f} s: {came}"
        yield Finding("hosts", "problem", text, "start the same command on all; open this port between them")
        return
    yield Finding("hosts", "ok", f"{hosts} at {host}:{port}: " + ", ".join(f"{f.name} ({f.address})" for f in facts))
    yield from check_facts(facts)
    yield from _check_network(store, number, hosts, facts)


def check_facts(facts: list[HostFacts]) -> Iterator[Finding]:
    """Compare what hosts say about themselves."""
    for what, versions in (("headway", {f.headway for f in facts}), ("torch", {f.torch for f in facts})):
        if len(versions) > 1:
            each = ", ".join(f"{f.name} {getattr(f, what)}" for f in facts)
            yield Finding("versions", "problem", f"{what} differs: {each}", f"install the same {what} everywhere")
        else:
            yield Finding("versions", "ok", f"{what} {versions.pop()} everywhere")
    interfaces = ", ".join(f"{f.name} {f.interface}" for f in facts)
    yield Finding("interfaces", "ok", interfaces)
    counts = {len(f.gpus) for f in facts}
    described = ", ".join(f"{f.name} {len(f.gpus)} x {f.gpus[0]}" if f.gpus else f"{f.name} none" for f in facts)
    if counts == {0}:
        yield Finding("gpus", "note", "none on any host: everything runs on CPUs")
    else:
        yield Finding("gpus", "ok" if len({tuple(f.gpus) for f in facts}) == 1 else "note", described)


def check_clocks(facts: list[HostFacts], times: list[float]) -> Finding:
    """Compare clocks that were read at one moment, to what messages take."""
    skew = max(times) - min(times)
    if skew > MOST_SKEW:
        fast, slow = facts[times.index(max(times))].name, facts[times.index(min(times))].name
        text = f"{fast} is {skew:.1f} s ahead of {slow}"
        return Finding("clocks", "warning", text, "synchronize them (chrony, systemd-timesyncd)")
    return Finding("clocks", "ok", f"within {skew:.2f} s")


def _meet(host: str, port: int, hosts: int, seconds: float) -> "tuple[TCPStore, int]":
    """Open the store where the host is this one and nobody has yet, else reach it. Returns it with our number."""
    from torch._C._distributed_c10d import TCPStore
    from torch.distributed import DistNetworkError, DistStoreError

    limit = timedelta(seconds=seconds)
    for first in (True, False) if is_own(host) else (False,):
        try:
            store = TCPStore(host, port, is_master=first, wait_for_workers=False, timeout=limit)
            return store, store.add("hosts", 1) - 1
        except (DistNetworkError, DistStoreError, RuntimeError) as error:
            if not first:
                reason = str(error).partition("\n")[0]
                raise HeadwayError(
                    f"nobody answers at {host}:{port}: {reason}; start this command on {host} too, and open that port"
                ) from None
    raise AssertionError("unreachable")


def _own_facts(host: str) -> HostFacts:
    import torch
    import torch.distributed as dist

    gpus = [row[0] for row in query_gpus("name,memory.total", timeout=2.5) if row[1].isdigit()]
    nccl = torch.cuda.is_available() and dist.is_nccl_available()
    address, interface = own_address(host), own_interface(host)
    name = os.environ.get("SLURMD_NODENAME") or platform.node()
    return HostFacts(name, address, interface, __version__, str(torch.__version__), gpus, nccl)


def _gather(store: "TCPStore", hosts: int, seconds: float) -> tuple[list[HostFacts], bool]:
    """Return the facts of all hosts, or of those that came in time, and whether some are missing."""
    deadline = time.monotonic() + seconds
    while not store.check([f"facts/{number}" for number in range(hosts)]) and time.monotonic() < deadline:
        time.sleep(0.1)
    came = [number for number in range(hosts) if store.check([f"facts/{number}"])]
    return [HostFacts(**_get(store, f"facts/{number}")) for number in came], len(came) < hosts


def _check_network(store: "TCPStore", number: int, hosts: int, facts: list[HostFacts]) -> Iterator[Finding]:
    """Connect every host to every other by gloo, and by NCCL where all have it; compare clocks and measure."""
    import torch
    import torch.distributed as dist
    from torch._C._distributed_c10d import PrefixStore

    for name in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
        os.environ.setdefault(name, facts[number].interface)
    try:
        dist.init_process_group("gloo", store=store, rank=number, world_size=hosts, timeout=timedelta(seconds=60))
        yield Finding("gloo", "ok", f"every host reaches every other: all-reduce {_speed(torch.device('cpu'))}")
        dist.barrier()
        _put(store, f"clock/{number}", time.time())
        yield check_clocks(facts, [float(_get(store, f"clock/{other}")) for other in range(hosts)])
        if all(fact.nccl for fact in facts):
            dist.destroy_process_group()
            dist.init_process_group("nccl", store=PrefixStore("nccl", store), rank=number, world_size=hosts)
            yield Finding("nccl", "ok", f"all-reduce between the hosts' first GPUs {_speed(torch.device('cuda', 0))}")
        dist.barrier()
    except RuntimeError as error:
        reason = str(error).partition("\n")[0]
        remedy = (
            "open all ports between the hosts, or name their network with GLOO_SOCKET_IFNAME and NCCL_SOCKET_IFNAME"
        )
        yield Finding("network", "problem", reason, remedy)
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()


def _speed(device: Any) -> str:
    """Sum tensors over all hosts, and say how fast each sent and received."""
    import torch
    import torch.distributed as dist

    tensor = torch.zeros(_BYTES // 4, device=device)
    dist.all_reduce(tensor)  # connects
    started = time.perf_counter()
    for _ in range(_REPEATS):
        dist.all_reduce(tensor)
    float(tensor[0])
    seconds = (time.perf_counter() - started) / _REPEATS
    # Of a sum over n hosts each one sends and receives 2 (n - 1) / n of the tensor.
    moved = 2 * (dist.get_world_size() - 1) / dist.get_world_size() * _BYTES
    return f"at {moved / seconds / 1e9:.2g} GB/s"


def _put(store: "TCPStore", key: str, value: object) -> None:
    store.set(key, json.dumps(value))


def _get(store: "TCPStore", key: str) -> Any:
    return json.loads(store.get(key))
