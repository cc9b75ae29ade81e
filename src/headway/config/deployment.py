"""Settings of a deployment: the machines of a run, and who starts its processes there."""

from typing import Literal, Self

from pydantic import Field, model_validator

from headway.config.base import Settings, broken_rule


class NodeSettings(Settings):
    nodes: int = Field(default=1, ge=1)
    """Nodes of this role. The orchestrator has one of its own."""
    processes: int = Field(default=1, ge=1)
    """Ranks or engines on each of them."""
    gpus: int = Field(default=0, ge=0)
    """GPUs of each node; 0 for CPUs."""
    cpus: float | None = Field(default=None, gt=0)
    """CPU cores that Kubernetes and Ray keep for each node. Default: none on Kubernetes, 1 on Ray."""
    memory: str | None = Field(default=None, pattern=r"^\d+(\.\d+)?(Mi|Gi|Ti)$")
    """Memory of each node on Kubernetes, such as 64Gi: kept for it, and its limit."""


class TrainerNodeSettings(NodeSettings):
    fewest: int | None = Field(default=None, ge=1)
    """Nodes with which the trainer goes on where no more are to be had: after one was lost, Slurm starts the job again
    with what it has. Needs a layout that allows it. Default: all of `nodes`."""

    @model_validator(mode="after")
    def _fewest_is_not_more(self) -> Self:
        if self.fewest is not None and self.fewest > self.nodes:
            raise broken_rule("fewest", f"must not be more than nodes ({self.nodes})")
        return self

    @property
    def hosts(self) -> str:
        """The number of hosts as `headway train --hosts` takes it."""
        return str(self.nodes) if self.fewest is None else f"{self.fewest}:{self.nodes}"


class KubernetesSettings(Settings):
    image: str = "headway:latest"
    """Image of all containers, such as one built from the `Containerfile`."""
    namespace: str | None = None
    """Namespace of all objects. Default: that of the current context."""
    form: Literal["jobs", "jobset", "leaderworkerset"] = "jobs"
    """jobs: a Job per role, which any cluster has. jobset: one JobSet. leaderworkerset: LeaderWorkerSets of trainer and
    engines. The last two need their controllers in the cluster."""
    claim: str | None = None
    """A PersistentVolumeClaim that is there and that all pods may mount together (ReadWriteMany): the run's folders,
    and what `setup` or `model.path` name below `deployment.folder`. Default: a claim each for head and trainer."""
    storage: str = Field(default="20Gi", pattern=r"^\d+(Mi|Gi|Ti)$")
    """Size of those claims."""
    tls_secret: str | None = None
    """A Secret of the type kubernetes.io/tls that is there and holds its authority, too, as `ca.crt`, as cert-manager
    makes them: pods speak TLS with it. The certificate must hold the name of the run's Service, headway-NAME. Default:
    plain HTTP between pods."""
    node_selector: dict[str, str] = {}
    """Labels of the nodes that may run trainer and engines."""


class RaySettings(Settings):
    address: str | None = None
    """Address of the Ray cluster, such as 10.0.0.1:6379. Default: RAY_ADDRESS, or the cluster of this machine."""


class DeploymentSettings(Settings):
    type: Literal["local", "slurm", "kubernetes", "ray"] = "local"
    """local: this machine starts all processes. slurm: a job of several nodes does. kubernetes: pods of a cluster.
    ray: actors of a Ray cluster."""
    folder: str = "outputs/nodes"
    """Folder for the files of a node's processes, on its own disk or a shared one. Variables are those of the node,
    such as $USER and $HEADWAY_NODE. On Kubernetes volumes are mounted there, and it is /outputs where it is not
    absolute. A run continues where this folder still is what it was."""
    trainer: TrainerNodeSettings = TrainerNodeSettings()
    """Nodes that train."""
    inference: NodeSettings = NodeSettings()
    """Nodes that serve the policy."""
    partition: str | None = None
    """Partition of the Slurm cluster. Default: the cluster's."""
    account: str | None = None
    """Account that pays. Default: the user's."""
    time: str | None = Field(default=None, pattern=r"^(\d+-)?\d+(:\d\d){0,2}$")
    """Time limit of a Slurm job, such as 24:00:00. A run that reaches it writes a checkpoint and is queued again."""
    grace_seconds: int = Field(default=120, ge=10)
    """Seconds before the time limit at which a job of Slurm is asked to stop, and that a pod gets to stop in."""
    environment: dict[str, str] = {}
    """Environment variables of all processes. Secrets do not belong here: they would be in the job's script or in the
    pods' description."""
    setup: str = ""
    """Lines of shell that every node runs first, such as `source venv/bin/activate`."""
    options: list[str] = []
    """More options of sbatch, such as --qos=high."""
    python: str | None = None
    """Python of the nodes that has Headway installed. Default: the one that submits; that of the image on
    Kubernetes."""
    kubernetes: KubernetesSettings = KubernetesSettings()
    """Objects of a Kubernetes cluster."""
    ray: RaySettings = RaySettings()
    """The Ray cluster."""

    @property
    def nodes(self) -> int:
        """Nodes of the job: the orchestrator's, the trainer's and the engines'."""
        return 1 + self.trainer.nodes + self.inference.nodes

    @property
    def fewest_nodes(self) -> int:
        """Nodes of the job where the trainer has its fewest."""
        return 1 + (self.trainer.fewest or self.trainer.nodes) + self.inference.nodes

    @model_validator(mode="after")
    def _is_one_line(self) -> Self:
        for name in ("folder", "partition", "account", "python"):
            value = getattr(self, name)
            if value is not None and not set(value).isdisjoint("\n\"'`"):
                raise broken_rule(name, "must be one line without quotes: it goes into the job's script")
        if any("\n" in option for option in self.options):
            raise broken_rule("options", "must be one line each")
        return self
