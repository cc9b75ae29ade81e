"""A dry run: the settings that each process would read, written down, and nothing started."""

from pathlib import Path
from typing import Any, TypeVar

from pydantic import BaseModel

from headway.base.hub import MODEL_FILES, pinned
from headway.base.imports import absolute_path
from headway.config.commands import write_process_settings
from headway.config.loader import write_settings
from headway.config.orchestrator import EnvSettings
from headway.config.rl import RlSettings
from headway.config.sft import SftSettings
from headway.config.shared import SharedSettings
from headway.core.rows import DATA_FILES
from headway.core.runs import RunPaths
from headway.monitor.runs import create_run

S = TypeVar("S", bound=SharedSettings)


def write_dry_run(settings: SharedSettings, command: str) -> list[Path]:
    """Write the settings of every process that `command` would start into the run's config folder. Returns the files.

    The run's name stays free. Raises UsageError when a run of that name exists.
    """
    paths = create_run(settings.run, command, dry_run=True)
    settings = with_absolute_paths(settings, paths, pin=False)
    if isinstance(settings, RlSettings):
        return write_process_settings(settings, paths.config)
    file = paths.config / f"{command}.toml"
    write_settings(settings, file)
    return [file]


def with_absolute_paths(settings: S, paths: RunPaths, *, pin: bool = True) -> S:
    """Write out the folders of run, model and `file.py:name`s, so that the settings hold from anywhere; and with `pin`,
    the commits of what comes from the hub (`with_pinned_commits`)."""
    if pin:
        settings = with_pinned_commits(settings)
    root, model = paths.root.resolve(), settings.model
    run = settings.run.model_copy(update={"name": root.name, "output_dir": root.parent})
    folder = str(Path(model.path).resolve()) if Path(model.path).is_dir() else model.path
    family = model.family and absolute_path(model.family)
    model = model.model_copy(update={"path": folder, "family": family})
    files = {name: file and file.resolve() for name, file in settings.tls}
    tls = settings.tls.model_copy(update=files) if settings.tls.certificate else settings.tls
    settings = settings.model_copy(update={"run": run, "model": model, "tls": tls})
    return _with_absolute_files(settings)  # type: ignore[no-any-return]  # what comes in goes out


def with_pinned_commits(settings: S) -> S:
    """Download models and data sets of the hub, and write the commits that they are at into their ids: every process
    and every resume of the run then reads the same files."""
    model = settings.model.model_copy(update={"path": pinned(settings.model.path, "model", MODEL_FILES)})
    changed: dict[str, Any] = {"model": model}
    if isinstance(settings, SftSettings):
        path = pinned(settings.data.path, "dataset", DATA_FILES)
        changed["data"] = settings.data.model_copy(update={"path": path})
    return settings.model_copy(update=changed)


def _with_absolute_files(value: Any) -> Any:
    """Write out the folders of all files that are there, also in texts of the form `file.py:name`."""
    if isinstance(value, BaseModel):
        given = {name: getattr(value, name) for name in value.model_fields_set}
        changed = {name: new for name, old in given.items() if (new := _with_absolute_files(old)) != old}
        if isinstance(value, EnvSettings) and "id" in changed and value.name is None:
            changed["name"] = value.id  # metrics keep the name that the user wrote
        return value.model_copy(update=changed) if changed else value
    if isinstance(value, dict):
        return {key: _with_absolute_files(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(_with_absolute_files(item) for item in value)
    if isinstance(value, Path) and value.expanduser().is_file():
        return value.expanduser().resolve()
    if isinstance(value, str) and ".py:" in value and Path(value.rpartition(":")[0]).expanduser().is_file():
        return absolute_path(value)
    return value
