"""The settings of each command, and of each process of a run: each gets what it reads, and nothing else."""

from pathlib import Path

from headway.config.base import Settings
from headway.config.host import HostSettings
from headway.config.inference import ServeSettings
from headway.config.loader import write_settings
from headway.config.orchestrator import OrchestrateSettings
from headway.config.rl import RlSettings
from headway.config.sft import SftSettings
from headway.config.trainer import TrainSettings

COMMAND_SETTINGS: dict[str, type[Settings]] = {
    "rl": RlSettings,
    "sft": SftSettings,
    "train": TrainSettings,
    "orchestrate": OrchestrateSettings,
    "serve": ServeSettings,
    "host": HostSettings,
}
PROCESSES: dict[str, type[Settings]] = {
    "trainer": TrainSettings,
    "orchestrator": OrchestrateSettings,
    "inference": ServeSettings,
}


def process_settings(settings: RlSettings) -> dict[str, Settings]:
    """Divide the settings of a run among its processes, by name.

    One exporter serves the whole run, and one run at W&B gets all its metrics: those of its supervisor.
    """
    tracking = settings.tracking.model_copy(update={"prometheus_port": None, "wandb": None})
    settings = settings.model_copy(update={"tracking": tracking})
    if settings.trainer.parallel.context > 1:
        # The orchestrator does not see the trainer's settings.
        placement = settings.placement.model_copy(update={"data_ranks": settings.data_ranks})
        settings = settings.model_copy(update={"placement": placement})
    return {
        name: kind.model_validate({field: getattr(settings, field) for field in kind.model_fields})
        for name, kind in PROCESSES.items()
    }


def write_process_settings(settings: RlSettings, folder: Path) -> list[Path]:
    """Write `rl.toml` and one file per process into `folder`. Returns the paths, in that order."""
    files = {folder / f"{name}.toml": part for name, part in {"rl": settings, **process_settings(settings)}.items()}
    for path, part in files.items():
        write_settings(part, path)
    return list(files)
