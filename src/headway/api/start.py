"""Start runs from Python: settings and environments become files of the run folder, and another process runs it."""

import os
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from headway.api.run import Run
from headway.api.settings import make_settings, settings
from headway.api.source import module_source
from headway.base.errors import HeadwayError, UsageError
from headway.base.files import write_atomic
from headway.config.loader import write_settings
from headway.config.rl import RlSettings
from headway.core.runs import RunPaths
from headway.envs.base import Environment
from headway.launch.checks import check_names
from headway.models.tiny import resolve_model
from headway.monitor.logs import next_log
from headway.monitor.runs import discard_run

EnvChoice = str | type[Environment] | Mapping[str, Any]
"""An environment: a class, a name as in settings, or a table as in settings whose `id` is either."""
SETTINGS_FILE, ENVIRONMENTS_FILE = "python.toml", "environments.py"


def rl(
    given: RlSettings | Mapping[str, Any] | str | Path,
    *,
    env: EnvChoice | Sequence[EnvChoice] = (),
    eval_env: EnvChoice | Sequence[EnvChoice] = (),
) -> Run:
    """Start a run and return at once; `wait` on the result to see it to its end.

    Settings are an object, a dictionary, or the path of a file. `env` and `eval_env` are added to the environments that
    they name; a class may be one that this notebook or script defines: its source is kept in the run folder. The run
    has processes of its own, and does not end with this one. Raises HeadwayError on wrong settings, and on environments
    and models that are not there.
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
    try:
        complete = _with_environments(chosen, envs, eval_envs, folder.config / ENVIRONMENTS_FILE)
        check_names(complete)
        resolve_model(complete.model.path, weights=False)
    except HeadwayError:
        discard_run(folder)
        raise
    write_settings(complete, file)
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
            if not issubclass(cls, Environment):
                raise UsageError(f"{cls.__name__} is no environment: derive it from headway.SingleTurn or MultiTurn")
            module = str(file) if cls in shipped else cls.__module__
            table["id"] = f"{module}:{cls.__name__}"
            table.setdefault("name", cls.__name__)
    plain = chosen.model_dump()
    plain["orchestrator"]["envs"] += tables[: len(envs)]
    plain["orchestrator"]["eval"]["envs"] += tables[len(envs) :]
    return make_settings(RlSettings, plain)


def _importable(cls: type) -> bool:
    """Tell whether another process finds the class by its module: not one that a script or a notebook defines."""
    return cls.__module__ != "__main__" and getattr(sys.modules.get(cls.__module__), cls.__name__, None) is cls


def _as_list(choice: EnvChoice | Sequence[EnvChoice]) -> list[EnvChoice]:
    if isinstance(choice, str | type | Mapping):
        return [choice]
    if isinstance(choice, Sequence):
        return list(choice)
    raise UsageError(f"an environment is a class, a name or a table (got {choice!r})")
