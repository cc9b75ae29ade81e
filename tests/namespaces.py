"""Hosts on one machine: network namespaces at a bridge, each with an address of its own and a link that can be cut."""

import itertools
import os
import shutil
import socket
import subprocess
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

_ALL_PACKETS = 3  # ETH_P_ALL
_FORCE_BUFFER = 33  # SO_RCVBUFFORCE


def missing() -> str | None:
    """Say why there are no network namespaces here; None where there are."""
    lacking = [name for name in ("ip", "nsenter") if shutil.which(name) is None]
    if lacking or os.geteuid() != 0:
        return f"no {', '.join(lacking)}: apt-get install iproute2" if lacking else "only root makes network namespaces"
    name = f"hwtry{os.getpid()}"
    made = subprocess.run(["ip", "netns", "add", name], capture_output=True, text=True)
    if made.returncode == 0:
        _ip("netns", "del", name)
        return None
    return f"no network namespaces: {made.stderr.strip()}"


@dataclass(frozen=True)
class Host:
    name: str
    address: str
    link: str

    def enter(self, *command: str) -> list[str]:
        """Return the command that runs `command` on this host. `ip netns exec` would hide cgroups from it."""
        return ["nsenter", f"--net=/run/netns/{self.name}", *command]

    def processes(self) -> list[int]:
        """Return the ids of all processes on this host."""
        found = subprocess.run(["ip", "netns", "pids", self.name], check=True, capture_output=True, text=True)
        return [int(number) for number in found.stdout.split()]

    def cut(self) -> None:
        _ip("link", "set", self.link, "down")

    def heal(self) -> None:
        _ip("link", "set", self.link, "up")


@dataclass(frozen=True)
class Network:
    bridge: str
    address: str
    """Of this machine itself."""
    hosts: list[Host]


_SERIALS = itertools.count()


@contextmanager
def network(count: int) -> Iterator[Network]:
    """Make hosts that reach each other and this machine, while the context lasts."""
    number = (os.getpid() + next(_SERIALS)) % 250  # never that of the network before: its links go a little later
    made = Network(
        f"hwbr{number}",
        f"10.77.{number}.254",
        [Host(f"hw{number}-{n}", f"10.77.{number}.{n}", f"hwv{number}-{n}") for n in range(1, count + 1)],
    )
    with ExitStack() as stack:
        _ip("link", "add", made.bridge, "type", "bridge")
        stack.callback(_ip, "link", "del", made.bridge)
        _ip("addr", "add", f"{made.address}/24", "dev", made.bridge)
        _ip("link", "set", made.bridge, "up")
        for host in made.hosts:
            _ip("netns", "add", host.name)
            stack.callback(_ip, "netns", "del", host.name)
            _ip("link", "add", host.link, "type", "veth", "peer", "name", "eth0", "netns", host.name)
            _ip("link", "set", host.link, "master", made.bridge, "up")
            _ip("-n", host.name, "addr", "add", f"{host.address}/24", "dev", "eth0")
            _ip("-n", host.name, "link", "set", "eth0", "up")
            _ip("-n", host.name, "link", "set", "lo", "up")
        yield made


class Capture:
    """Every packet that passes an interface while the context lasts."""

    def __init__(self, interface: str) -> None:
        self._socket = socket.socket(socket.AF_PACKET, socket.SOCK_RAW, socket.htons(_ALL_PACKETS))
        self._socket.setsockopt(socket.SOL_SOCKET, _FORCE_BUFFER, 1 << 26)
        self._socket.bind((interface, 0))
        self._socket.settimeout(0.2)
        self._packets: list[bytes] = []
        self._end = threading.Event()
        self._thread = threading.Thread(target=self._record, daemon=True)

    def __enter__(self) -> "Capture":
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._end.set()
        self._thread.join()
        self._socket.close()

    @property
    def size(self) -> int:
        return sum(map(len, self._packets))

    def holds(self, secret: bytes) -> bool:
        """Tell whether a packet, or two that follow each other, hold `secret`; headers of a packet take 66 bytes."""
        if any(secret in packet for packet in self._packets):
            return True
        return secret in b"".join(packet[66:] for packet in self._packets)

    def _record(self) -> None:
        while not self._end.is_set():
            try:
                self._packets.append(self._socket.recv(1 << 16))
            except TimeoutError:
                continue


def make_certificates(folder: Path, hosts: list[Host], name: str = "") -> Path:
    """Write HOST.pem and HOST.key for every host, signed by an authority; returns the authority's certificate.

    They hold the host's address, or `name`.
    """
    folder.mkdir()
    make = ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes", "-days", "2"]
    authority, key = folder / "authority.pem", folder / "authority.key"
    usage = ["-addext", "keyUsage=critical,keyCertSign", "-subj", "/CN=authority"]
    subprocess.run([*make, *usage, "-keyout", key, "-out", authority], check=True, capture_output=True)
    for host in hosts:
        names = ["-subj", f"/CN={host.name}"]
        for extension in (
            f"subjectAltName={f'DNS:{name}' if name else f'IP:{host.address}'}",
            "basicConstraints=critical,CA:FALSE",  # openssl makes authorities by default, and these need more
            "authorityKeyIdentifier=keyid",
        ):
            names += ["-addext", extension]
        files = ["-keyout", folder / f"{host.name}.key", "-out", folder / f"{host.name}.pem"]
        subprocess.run([*make, *names, "-CA", authority, "-CAkey", key, *files], check=True, capture_output=True)
    return authority


def _ip(*arguments: str) -> None:
    done = subprocess.run(["ip", *arguments], capture_output=True, text=True)
    assert done.returncode == 0, f"ip {' '.join(arguments)}: {done.stderr}"
