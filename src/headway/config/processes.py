"""A run's settings dealt to its processes: each gets what it reads, and nothing else."""

from pathlib import Path

from headway.config.base import Settings
from headway.config.inference import ServeSettings
from headway.config.loader import write_settings
from headway.config.orchestrator import OrchestrateSettings
from headway.config.rl import RlSettings
from headway.config.trainer import TrainSettings

PROCESSES: dict[str, type[Settings]] = {
    "trainer": TrainSettings,
    "orchestrator": OrchestrateSettings,
    "inference": ServeSettings,
}


def process_settings(settings: RlSettings) -> dict[str, Settings]:
    """The settings of each process of a run, by its name."""
    return {name: _part(settings, kind) for name, kind in PROCESSES.items()}


def write_process_settings(settings: RlSettings, folder: Path) -> list[Path]:
    """Write `rl.toml` and one file per process into `folder`; the paths, in that order."""
    files = {"rl": settings, **process_settings(settings)}
    for name, part in files.items():
        write_settings(part, folder / f"{name}.toml")
    return [folder / f"{name}.toml" for name in files]


def _part(settings: RlSettings, kind: type[Settings]) -> Settings:
    return kind.model_validate({name: getattr(settings, name) for name in kind.model_fields})
