"""Start runs from Python: settings and environments become files of the run folder, and another process runs it."""

import os
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ValidationError

from headway.api.run import Run
from headway.api.source import module_source
from headway.base.errors import UsageError
from headway.base.files import write_atomic
from headway.config.loader import load_settings, write_settings
from headway.config.rl import RlSettings
from headway.core.runs import RunPaths
from headway.envs.base import Environment
from headway.monitor.logs import next_log

EnvChoice = str | type[Environment] | Mapping[str, Any]
"""An environment: a class, a name as in settings, or a table as in settings whose `id` is either."""
SETTINGS_FILE, ENVIRONMENTS_FILE = "python.toml", "environments.py"


def settings(*files: str | Path, **changes: Any) -> RlSettings:
    """Make settings from files, later ones over earlier ones, and changes: `settings("rl.toml", max_steps=10)`.

    Sections are dictionaries: `trainer={"optim": {"lr": 1e-5}}`. Raises UsageError on what files or changes have wrong.
    """
    argv = [word for file in files for word in ("@", str(file))]
    return load_settings(RlSettings, argv, changes=_plain(changes)).settings


def rl(
    given: RlSettings | Mapping[str, Any] | str | Path,
    *,
    env: EnvChoice | Sequence[EnvChoice] = (),
    eval_env: EnvChoice | Sequence[EnvChoice] = (),
) -> Run:
    """Start a run and return at once; `wait` on the result to see it to its end.

    Settings are an object, a dictionary, or the path of a file. `env` and `eval_env` are added to the environments that
    they name; a class may be one that this notebook or script defines: its source is kept in the run folder. The run
    has processes of its own, and does not end with this one. Raises UsageError on anything wrong with the settings.
    """
    if isinstance(given, RlSettings):
        chosen = given
    else:
        chosen = settings(**given) if isinstance(given, Mapping) else settings(given)
    envs, eval_envs = _as_list(env), _as_list(eval_env)
    if not envs and not chosen.orchestrator.envs:
        raise UsageError("no environment to train on; give one: headway.rl(settings, env=MyEnvironment)")
    folder = _new_folder(chosen)
    file = folder.config / SETTINGS_FILE
    write_settings(_with_environments(chosen, envs, eval_envs, folder.config / ENVIRONMENTS_FILE), file)
    log = next_log(folder.logs, "launcher")
    place = ["--run.name", folder.root.name, "--run.output_dir", str(folder.root.parent)]
    with log.open("ab") as output:
        launcher = subprocess.Popen(
            [sys.executable, "-m", "headway.cli.main", "rl", "@", str(file), *place],
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            env={**os.environ, "COLUMNS": "160"},
            start_new_session=True,  # an interrupt of the notebook is not meant for the run
        )
    return Run(folder.root, launcher=launcher, log=log, max_steps=chosen.max_steps)


def _new_folder(chosen: RlSettings) -> RunPaths:
    """Make the folder of the run, which its launcher claims."""
    outputs = chosen.run.output_dir.expanduser().resolve()
    name, attempt = chosen.run.name, 1
    while True:
        stamp = time.strftime("%Y%m%d-%H%M%S")
        paths = RunPaths(outputs / (name or f"{stamp}-rl" + (f"-{attempt}" if attempt > 1 else "")))
        if name and paths.record.exists():
            raise UsageError(f"{paths.root} already exists; choose another run.name, or continue it with --resume")
        try:
            paths.config.mkdir(parents=True, exist_ok=name is not None)
            return paths
        except FileExistsError:
            attempt += 1


def _with_environments(chosen: RlSettings, envs: list[EnvChoice], eval_envs: list[EnvChoice], file: Path) -> RlSettings:
    """Add environments to those of the settings; classes that no other process could import go into `file`."""
    tables = [dict(choice) if isinstance(choice, Mapping) else {"id": choice} for choice in (*envs, *eval_envs)]
    classes: dict[type, None] = dict.fromkeys(cls for table in tables if isinstance(cls := table.get("id"), type))
    shipped = [cls for cls in classes if not _importable(cls)]
    if shipped:
        write_atomic(file, module_source(*shipped))
    for table in tables:
        if isinstance(cls := table.get("id"), type):
            module = str(file) if cls in shipped else cls.__module__
            table["id"] = f"{module}:{cls.__name__}"
            table.setdefault("name", cls.__name__)
    plain = chosen.model_dump()
    plain["orchestrator"]["envs"] += tables[: len(envs)]
    plain["orchestrator"]["eval"]["envs"] += tables[len(envs) :]
    try:
        return RlSettings.model_validate(plain)
    except ValidationError as error:
        lines = [f"{'.'.join(map(str, one['loc']))}: {one['msg']}" for one in error.errors()]
        raise UsageError("\n".join(lines)) from None


def _importable(cls: type) -> bool:
    """Tell whether another process finds the class by its module: not one that a script or a notebook defines."""
    return cls.__module__ != "__main__" and getattr(sys.modules.get(cls.__module__), cls.__name__, None) is cls


def _as_list(choice: EnvChoice | Sequence[EnvChoice]) -> list[EnvChoice]:
    if isinstance(choice, str | type | Mapping):
        return [choice]
    return list(choice)


def _plain(value: Any) -> Any:
    """Write paths as texts and tuples as lists, as files of settings have them."""
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    if isinstance(value, BaseModel):
        return _plain(value.model_dump())
    return str(value) if isinstance(value, Path) else value
