"""A real Slurm on this machine: its controller and a few nodes, each a `slurmd`, without systemd or cgroups."""

import os
import platform
import shutil
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

CONFIG = """\
ClusterName=headway
SlurmctldHost={host}(127.0.0.1)
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=cred_expire=5
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
SlurmdTimeout=15
InactiveLimit=0
AccountingStorageType=accounting_storage/none
JobAcctGatherType=jobacct_gather/none
SlurmdParameters=config_overrides
NodeName=node[1-{nodes}] NodeHostname={host} NodeAddr=127.0.0.1 Port=[{first}-{last}] CPUs=2 Sockets=1 \
CoresPerSocket=2 ThreadsPerCore=1 RealMemory=1000 State=UNKNOWN
PartitionName=main Nodes=ALL Default=YES MaxTime=INFINITE State=UP OverSubscribe=NO
"""


def missing() -> str | None:
    """Say why there is no Slurm here; None where there is one."""
    lacking = [name for name in ("slurmctld", "slurmd", "sbatch", "munged") if shutil.which(name) is None]
    if lacking:
        return f"no {', '.join(lacking)}: apt-get install slurm-wlm munge"
    return None if os.geteuid() == 0 else "slurmd and munged start as root only"


@dataclass(frozen=True)
class Cluster:
    root: Path

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

    def pid(self, name: str) -> int:
        return int((self.root / f"{name}.pid").read_text())


@contextmanager
def slurm(root: Path, nodes: int, port: int = 16817) -> Iterator[Cluster]:
    root.mkdir(parents=True, exist_ok=True)
    (root / "state").mkdir()
    cluster, host = Cluster(root), platform.node().partition(".")[0]
    settings = {"root": root, "host": host, "nodes": nodes, "port": port, "first": port + 1, "last": port + nodes}
    (root / "slurm.conf").write_text(CONFIG.format(**settings))
    _start_munge()
    names = [f"node{number}" for number in range(1, nodes + 1)]
    try:
        cluster.run("slurmctld", "-f", str(root / "slurm.conf"))
        for name in names:
            (root / f"spool-{name}").mkdir()
            cluster.run("slurmd", "-f", str(root / "slurm.conf"), "-N", name)
        deadline = time.monotonic() + 60
        while cluster.run("sinfo", "-h", "-t", "idle", "-o", "%D").strip() != str(nodes):
            assert time.monotonic() < deadline, cluster.run("sinfo", "-N")
            time.sleep(0.1)
        yield cluster
    finally:
        subprocess.run(["scancel", "--user=root"], env=cluster.environment, check=False)
        deadline = time.monotonic() + 60
        while cluster.jobs() and time.monotonic() < deadline:
            time.sleep(0.2)
        for name in ("slurmctld", *(f"slurmd-{name}" for name in names)):
            if (root / f"{name}.pid").exists():
                os.kill(cluster.pid(name), 15)


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
