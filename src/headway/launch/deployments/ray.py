"""Ray: the roles of a run as actors of one placement group. What dies with its node is started on another one."""

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any

from headway.base.errors import STOPPED, HeadwayError, UsageError
from headway.base.extras import install_command
from headway.base.files import write_atomic
from headway.base.processes import die_with_parent_environment, free_port
from headway.config.deployment import NodeSettings
from headway.config.rl import RlSettings
from headway.config.toml import to_toml
from headway.core.runs import RunPaths
from headway.launch.deployments.roles import role_commands
from headway.launch.process import RestartBudget
from headway.transport.control.folder import SERVICE_FILE
from headway.transport.control.tokens import TOKEN, find_token, write_token

_PLACE_SECONDS = 600.0
"""Time that a cluster gets to find room for the run."""
_LOST_DELAY = 1.0
_LOST_AGAIN_SECONDS = 60.0
"""Time in which a role that waits for a node is still the one that lost its node."""
_STOP_SECONDS = 180.0
"""Time that roles get to write their checkpoints when the run is stopped."""


@dataclass
class Role:
    """A node of the run: its command, what it asks of the cluster, and the actor that runs it."""

    name: str
    command: str
    asks: dict[str, float]
    actor: Any = None
    budget: RestartBudget = field(default_factory=RestartBudget)
    lost: float = -_LOST_AGAIN_SECONDS


def preview(settings: RlSettings, port: int | None) -> str:
    """Describe the bundles of the placement group and the command of each."""
    plan = [{"name": role.name, "bundle": role.asks, "command": role.command.strip()} for role in _roles(settings)]
    return json.dumps(plan, indent=2) + "\n"


def launch(settings: RlSettings, paths: RunPaths, port: int | None) -> bool:
    """Run to the end, from here: actors go with this process. The run's address is kept in its folder."""
    write_token(paths)
    with _cluster(settings), _signals() as stopped:
        run = RayRun(settings, paths, port)
        try:
            run.place()
            return run.supervise(stopped)
        finally:
            run.end()


class RayRun:
    """Places the roles, starts them, and starts again what dies."""

    def __init__(self, settings: RlSettings, paths: RunPaths, port: int | None) -> None:
        self._settings, self._paths, self._port = settings, paths, port
        self._roles = _roles(settings)
        self._group: Any = None
        self._running: dict[Any, Role] = {}

    def place(self) -> None:
        """Wait for room, and make an actor in each bundle. Raises HeadwayError where there is none in time."""
        import ray
        from ray.util.placement_group import placement_group
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        self._group = placement_group([role.asks for role in self._roles], strategy="SPREAD")
        print(f"waiting for room for {len(self._roles)} nodes: {[role.asks for role in self._roles]}", flush=True)
        if not self._group.wait(_PLACE_SECONDS):
            raise HeadwayError(
                f"the Ray cluster found no room in {_PLACE_SECONDS:.0f} s; see `ray status`, or ask for less"
            )
        for index, role in enumerate(self._roles):
            where = PlacementGroupSchedulingStrategy(self._group, placement_group_bundle_index=index)
            # Two calls at once: one that runs the role, and one that ends it.
            options = {"num_cpus": role.asks["CPU"], "num_gpus": role.asks.get("GPU", 0), "max_concurrency": 2}
            actor = ray.remote(**options, max_restarts=-1)(RoleProcess)
            role.actor = actor.options(scheduling_strategy=where, name=f"{self._paths.root.name}-{role.name}").remote()

    def supervise(self, stopped: threading.Event) -> bool:
        """Run until the head has ended. Returns False where the run was stopped. Raises HeadwayError on failure."""
        import ray

        self._start_all()
        while True:
            if stopped.is_set():
                self._stop()
                return False
            done, _ = ray.wait(list(self._running), timeout=0.5)
            for call in done:
                role = self._running.pop(call)
                code = self._result(call)
                if role is self._roles[0] and code in (0, STOPPED):
                    self._leave()
                    return code == 0
                if code != 0:
                    self._again(role, code)

    def end(self) -> None:
        """Give the cluster back what this run had."""
        import ray
        from ray.util.placement_group import remove_placement_group

        for role in self._roles:
            if role.actor is not None:
                ray.kill(role.actor)
        if self._group is not None:
            remove_placement_group(self._group)
        (self._paths.control / SERVICE_FILE).unlink(missing_ok=True)

    def _start_all(self) -> None:
        """Start the head where it is now, and the others with its address."""
        import ray

        host, free = ray.get(self._roles[0].actor.address.remote())
        self._host, self._url = host, f"http://{host}:{self._port or free}"
        write_atomic(self._paths.control / SERVICE_FILE, f"{self._url}\n")
        print(f"control service: {self._url}", flush=True)
        for role in self._roles:
            self._start(role)

    def _start(self, role: Role) -> None:
        token = find_token(self._paths)
        assert token is not None
        environment = {
            **self._settings.deployment.environment,
            "HEADWAY_RUN": self._paths.root.name,
            "HEADWAY_HOST": self._host,
            "HEADWAY_PORT": self._url.rpartition(":")[2],
            "HEADWAY_URL": self._url,
            "HEADWAY_NODE": role.name,
            TOKEN: token,
        }
        call = role.actor.run.remote(role.command, environment, to_toml(self._settings))
        self._running[call] = role

    def _result(self, call: Any) -> int | None:
        """Return the exit code of a role; None where its node or its actor is gone."""
        import ray

        try:
            return int(ray.get(call))
        except ray.exceptions.RayActorError:
            return None

    def _again(self, role: Role, code: int | None) -> None:
        """Start a role again: with its node gone, wherever Ray puts its actor now. Without the head all start again."""
        if code == UsageError.exit_code:
            raise UsageError(f"{role.name} refused its settings; see `ray logs`")
        delay = role.budget.died(0.0, 0) if code is not None else _LOST_DELAY
        if delay is None:
            raise HeadwayError(f"{role.name} died {role.budget.deaths} times in a row; see `ray logs`")
        if code is not None or time.monotonic() - role.lost > _LOST_AGAIN_SECONDS:
            print(f"{role.name} " + ("lost its node" if code is None else f"ended with {code}") + "; starting again")
        if code is None:
            role.lost = time.monotonic()
        time.sleep(delay)
        if role is self._roles[0]:
            self._stop()
            self._start_all()
        else:
            self._start(role)

    def _stop(self) -> None:
        """Ask all to end, and wait until they have written what they must."""
        import ray

        for role in self._running.values():
            role.actor.stop.remote()
        ray.wait(list(self._running), num_returns=max(1, len(self._running)), timeout=_STOP_SECONDS)
        self._running.clear()

    def _leave(self) -> None:
        """Give trainer and engines time to end by themselves: the run told them to."""
        import ray

        if self._running:
            ray.wait(list(self._running), num_returns=len(self._running), timeout=_STOP_SECONDS)


class RoleProcess:
    """The actor of a role: runs its command on the node where Ray put it, and ends with it."""

    def __init__(self) -> None:
        self._child: subprocess.Popen[bytes] | None = None

    def address(self) -> tuple[str, int]:
        """Return the address of this node, and a port that is free there."""
        import ray

        host = str(ray.util.get_node_ip_address())
        return host, free_port(host)

    def run(self, command: str, environment: dict[str, str], settings: str) -> int:
        """Run a command to its end. Returns its exit code."""
        file = Path(f"/tmp/headway-{os.getpid()}.toml")
        write_atomic(file, settings)
        extra = {"HEADWAY_SETTINGS": str(file), **die_with_parent_environment()}
        try:
            self._child = subprocess.Popen(["bash", "-c", command], env={**os.environ, **environment, **extra})
            return self._child.wait()
        finally:
            file.unlink(missing_ok=True)

    def stop(self) -> None:
        if self._child is not None:
            self._child.send_signal(signal.SIGTERM)


def _roles(settings: RlSettings) -> list[Role]:
    """List the head, the trainer's node and the engines'. Raises UsageError where Ray could not run them."""
    deployment = settings.deployment
    if deployment.trainer.nodes > 1:
        raise UsageError("on Ray the trainer has one node; give it more processes there, deployment.trainer.processes")
    commands = role_commands(settings, deployment.python or sys.executable)
    engines = [
        (f"engine-{index}", commands.engine, deployment.inference) for index in range(deployment.inference.nodes)
    ]
    nodes = [("head", commands.head, NodeSettings()), ("trainer", commands.trainer, deployment.trainer), *engines]
    return [Role(name, f"{deployment.setup}\n{command}", _asks(node)) for name, command, node in nodes]


def _asks(node: NodeSettings) -> dict[str, float]:
    return {"CPU": node.cpus or 1.0, **({"GPU": float(node.gpus)} if node.gpus else {})}


@contextmanager
def _cluster(settings: RlSettings) -> Iterator[None]:
    """Connect to the cluster of the settings. Raises UsageError where there is none."""
    try:
        import ray
    except ImportError:
        raise UsageError(f"deployment.type ray needs Ray: {install_command('ray')}") from None
    try:
        ray.init(address=settings.deployment.ray.address or "auto", logging_level="error")
    except (ConnectionError, ValueError) as error:
        raise UsageError(f"no Ray cluster answers ({error}); start one by `ray start --head`") from None
    try:
        yield
    finally:
        ray.shutdown()


@contextmanager
def _signals() -> Iterator[threading.Event]:
    """Note the signals by which a user stops the run."""
    stopped = threading.Event()

    def note(number: int, frame: FrameType | None) -> None:
        stopped.set()

    before = {number: signal.signal(number, note) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield stopped
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
