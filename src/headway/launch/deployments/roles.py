"""Commands of a run's roles on their nodes: lines of shell whose variables the scheduler's side sets.

| variable | meaning |
|---|---|
| HEADWAY_RUN, HEADWAY_SETTINGS | name of the run, and the file with its settings |
| HEADWAY_HOST, HEADWAY_PORT, HEADWAY_URL | address of the control service; the host is that of the head alone |
| HEADWAY_NODE | name of this node, by which its folder and its engines are told apart |
| HEADWAY_TRAINER_NODES | nodes that the trainer has this time, where the scheduler knows it |
| HEADWAY_TOKEN | the run's token |
"""

import re
from dataclasses import dataclass

from headway.base.errors import UsageError
from headway.config.rl import RlSettings

_HEAD = """
run="{folder}/$HEADWAY_RUN"
if [ -f "$run/run.json" ]; then cp "$HEADWAY_SETTINGS" "$run/config/rl.toml"; set -- --resume "$run"
else set -- @ "$HEADWAY_SETTINGS" --run.name "$HEADWAY_RUN" --run.output_dir "{folder}"; fi
exec {headway} rl "$@" --deployment.type local --only orchestrator --control.host "$HEADWAY_HOST" \\
  --control.port "$HEADWAY_PORT"
"""
_TRAINER = """
exec {headway} train --run "$HEADWAY_URL" --restart --run.name "$HEADWAY_RUN.trainer" --run.output_dir "{folder}"
"""
_TRAINER_OF_SEVERAL = """
exec {headway} train --run "$HEADWAY_URL" --hosts {hosts} --run.name "$HEADWAY_RUN.trainer" --run.output_dir "{folder}"
"""
_ENGINE = """
exec {headway} serve --run "$HEADWAY_URL" --replicas {processes} --name "inference-$HEADWAY_NODE" \\
  --run.name "$HEADWAY_RUN.$HEADWAY_NODE" --run.output_dir "{folder}"{flags}
"""


@dataclass(frozen=True)
class RoleCommands:
    """The commands of the three roles, each for one node."""

    head: str
    trainer: str
    engine: str


def role_commands(settings: RlSettings, python: str, *, folder: str | None = None, engine: str = "") -> RoleCommands:
    """Write the commands of a run. `engine` has more flags of engines. Raises UsageError where nodes and ranks do not
    fit, or where the run has no name by which its nodes could speak of it."""
    deployment = settings.deployment
    check_roles(settings)
    common = {"folder": folder or deployment.folder, "headway": f"{python} -m headway.cli.main"}
    trainer = _TRAINER_OF_SEVERAL if deployment.trainer.nodes > 1 else _TRAINER
    flags = f" {engine}" if engine else ""
    return RoleCommands(
        head=_HEAD.format(**common),
        trainer=trainer.format(**common, hosts=deployment.trainer.hosts),
        engine=_ENGINE.format(**common, processes=deployment.inference.processes, flags=flags),
    )


def check_roles(settings: RlSettings) -> None:
    trainer, ranks = settings.deployment.trainer, settings.placement.trainer_ranks
    if trainer.nodes * trainer.processes != ranks:
        raise UsageError(
            f"placement.trainer_ranks is {ranks}, but deployment.trainer has {trainer.nodes} nodes of "
            f"{trainer.processes} processes; make them {ranks} together"
        )
    if not re.fullmatch(r"[\w.-]+", settings.run.name or ""):
        raise UsageError("a run of several machines needs a name; give it a --run.name")
