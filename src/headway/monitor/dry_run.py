"""A dry run: the settings that each process would read, written down, and nothing started."""

from pathlib import Path

from headway.config.loader import write_settings
from headway.config.processes import write_process_settings
from headway.config.rl import RlSettings
from headway.config.shared import RunSettings, SharedSettings
from headway.monitor.runs import create_run


def write_dry_run(settings: SharedSettings, command: str) -> list[Path]:
    """Write the settings of every process that `command` would start into the run's config folder; the files.

    The run's name stays free. The name and folder are written out, so that the files work from anywhere. Raises
    UsageError when a run of that name exists.
    """
    paths = create_run(settings.run, command, dry_run=True)
    root = paths.root.resolve()
    placed = settings.model_copy(update={"run": RunSettings(name=root.name, output_dir=root.parent)})
    if isinstance(placed, RlSettings):
        return write_process_settings(placed, paths.config)
    file = paths.config / f"{command}.toml"
    write_settings(placed, file)
    return [file]
