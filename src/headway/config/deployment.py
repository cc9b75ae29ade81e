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


class DeploymentSettings(Settings):
    type: Literal["local", "slurm"] = "local"
    """local: this machine starts all processes. slurm: a job of several nodes does."""
    folder: str = "outputs/nodes"
    """Folder for the files of a node's processes, on its own disk or a shared one. Variables are those of the node,
    such as $USER and $SLURMD_NODENAME. A run continues where this folder still is what it was."""
    trainer: NodeSettings = NodeSettings()
    """Nodes that train."""
    inference: NodeSettings = NodeSettings()
    """Nodes that serve the policy."""
    partition: str | None = None
    """Partition of the cluster. Default: the cluster's."""
    account: str | None = None
    """Account that pays. Default: the user's."""
    time: str | None = Field(default=None, pattern=r"^(\d+-)?\d+(:\d\d){0,2}$")
    """Time limit of the job, such as 24:00:00. A run that reaches it writes a checkpoint and is queued again."""
    grace_seconds: int = Field(default=120, ge=10)
    """Seconds before the time limit at which the run is asked to stop."""
    environment: dict[str, str] = {}
    """Environment variables of all processes. Secrets do not belong here: they would be in the job's script."""
    setup: str = ""
    """Lines of shell that every node runs first, such as `source venv/bin/activate`."""
    options: list[str] = []
    """More options of sbatch, such as --qos=high."""
    python: str | None = None
    """Python of the nodes that has Headway installed. Default: the one that submits."""

    @property
    def nodes(self) -> int:
        """Nodes of the job: the orchestrator's, the trainer's and the engines'."""
        return 1 + self.trainer.nodes + self.inference.nodes

    @model_validator(mode="after")
    def _is_one_line(self) -> Self:
        for name in ("folder", "partition", "account", "python"):
            value = getattr(self, name)
            if value is not None and not set(value).isdisjoint("\n\"'`"):
                raise broken_rule(name, "must be one line without quotes: it goes into the job's script")
        if any("\n" in option for option in self.options):
            raise broken_rule("options", "must be one line each")
        return self
