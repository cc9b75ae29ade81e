"""A real Slurm on this machine: its controller, and nodes in network namespaces, without systemd or cgroups."""

import os
import platform
import re
import shutil
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import namespaces
from namespaces import Host, network

CONFIG = """\
ClusterName=headway
SlurmctldHost={host}({address})
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=cred_expire=15
CryptoType=crypto/munge
SlurmctldPort={port}
SlurmctldPidFile={root}/slurmctld.pid
SlurmdPidFile={root}/slurmd-%n.pid
SlurmdSpoolDir={root}/spool-%n
StateSaveLocation={root}/state
SlurmctldLogFile={root}/slurmctld.log
SlurmdLogFile={root}/slurmd-%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SwitchType=switch/none
MpiDefault=none
ReturnToService=2
JobRequeue=1
KillWait=30
SchedulerParameters=sched_interval=2,bf_interval=2
SlurmctldTimeout=10
SlurmdTimeout=300
InactiveLimit=0
AccountingStorageType=accounting_storage/none
JobAcctGatherType=jobacct_gather/none
SlurmdParameters=config_overrides
{nodes}
PartitionName=main Nodes=ALL Default=YES MaxTime=INFINITE State=UP OverSubscribe=NO
"""


_NODE = """\
NodeName={name} NodeHostname={name} NodeAddr={address} Port=17001 CPUs=2 Sockets=1 CoresPerSocket=2 ThreadsPerCore=1 \
RealMemory=1000 State=UNKNOWN"""


def missing() -> str | None:
    """Say why there is no Slurm here; None where there is one."""
    lacking = [name for name in ("slurmctld", "slurmd", "sbatch", "munged") if shutil.which(name) is None]
    return f"no {', '.join(lacking)}: apt-get install slurm-wlm munge" if lacking else namespaces.missing()


@dataclass(frozen=True)
class Cluster:
    root: Path
    nodes: dict[str, Host]

    @property
    def environment(self) -> dict[str, str]:
        return {**os.environ, "SLURM_CONF": str(self.root / "slurm.conf"), "OMP_NUM_THREADS": "1"}

    def run(self, *command: str) -> str:
        done = subprocess.run(command, env=self.environment, capture_output=True, text=True, timeout=60)
        assert done.returncode == 0, f"{command}: {done.stderr}"
        return done.stdout

    def jobs(self) -> str:
        """States of the jobs that are queued or run."""
        return self.run("squeue", "--noheader", "--format=%T").strip()

    def restarts(self, job: str) -> int:
        """How often a job was queued again."""
        found = re.search(r"Restarts=(\d+)", self.run("scontrol", "show", "job", job))
        assert found
        return int(found[1])

    def notice_deaths_after(self, seconds: int) -> None:
        """Set the time without an answer after which a node is down."""
        config = self.root / "slurm.conf"
        config.write_text(re.sub("SlurmdTimeout=.*", f"SlurmdTimeout={seconds}", config.read_text()))
        self.run("scontrol", "reconfigure")

    def kill_node(self, name: str) -> None:
        """Kill -9 a node's daemon and everything that runs there, as a loss of power does."""
        while pids := self.nodes[name].processes():
            for pid in pids:
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)


@contextmanager
def slurm(root: Path, nodes: int, port: int = 16817) -> Iterator[Cluster]:
    """Run a cluster of node1, node2, ... while the context lasts."""
    (root / "state").mkdir(parents=True)
    with ExitStack() as stack:
        made = stack.enter_context(network(nodes))
        cluster = Cluster(root, {f"node{number}": host for number, host in enumerate(made.hosts, 1)})
        settings = {"root": root, "host": platform.node().partition(".")[0], "address": made.address, "port": port}
        lines = [_NODE.format(name=name, address=host.address) for name, host in cluster.nodes.items()]
        (root / "slurm.conf").write_text(CONFIG.format(**settings, nodes="\n".join(lines)))
        _start_munge()
        cluster.run("slurmctld", "-f", str(root / "slurm.conf"))
        stack.callback(_end, cluster)
        for name, host in cluster.nodes.items():
            (root / f"spool-{name}").mkdir()
            cluster.run(*host.enter("slurmd", "-f", str(root / "slurm.conf"), "-N", name))
        _wait(lambda: cluster.run("sinfo", "-h", "-t", "idle", "-o", "%D").strip() == str(nodes))
        yield cluster


def _end(cluster: Cluster) -> None:
    """Cancel what is left, and end all daemons."""
    subprocess.run(["scancel", "--user=root"], env=cluster.environment, check=False)
    with suppress(AssertionError):
        _wait(lambda: not cluster.jobs())
    os.kill(int((cluster.root / "slurmctld.pid").read_text()), signal.SIGTERM)
    for name in cluster.nodes:
        cluster.kill_node(name)


def _wait(true: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 120
    while not true():
        assert time.monotonic() < deadline, "the cluster did not get ready in two minutes"
        time.sleep(0.1)


def _start_munge() -> None:
    """Start the authentication service, unless one is running."""
    if subprocess.run(["munge", "-n"], capture_output=True).returncode == 0:
        return
    key = Path("/etc/munge/munge.key")
    Path("/run/munge").mkdir(exist_ok=True)
    if not key.exists():
        key.write_bytes(os.urandom(1024))
    key.chmod(0o400)
    for path in (Path("/run/munge"), Path("/etc/munge"), Path("/var/lib/munge"), Path("/var/log/munge"), key):
        shutil.chown(path, "munge", "munge")
    Path("/run/munge").chmod(0o755)
    start = ["setpriv", "--reuid", "munge", "--regid", "munge", "--clear-groups", "munged"]
    subprocess.run(start, check=True, capture_output=True)
