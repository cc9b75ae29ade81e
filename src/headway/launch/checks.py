"""Checks before a run: all that its settings name is there and fits together. They write nothing."""

import asyncio
from collections.abc import Iterable, Iterator
from contextlib import AsyncExitStack
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from pydantic import BaseModel

from headway.algorithms.base import Context
from headway.base.errors import HeadwayError, UsageError
from headway.base.imports import check_object
from headway.config.losses import CustomLoss, Dppo
from headway.config.optimizers import CustomOptimizer, CustomSchedule
from headway.config.rl import RlSettings
from headway.config.trainer import TrainerSettings
from headway.envs.packages.lock import LOCK_FILE, check_locked
from headway.envs.registry import check_environment, top_module
from headway.launch.placement import place_here
from headway.models.registry import load_config
from headway.models.tiny import BUILT_IN, resolve_model
from headway.orchestrator.collect.filters import load_filters, load_gates
from headway.orchestrator.environments import WorkerPools
from headway.rendering.load import load_renderer


def check_start(settings: RlSettings) -> Path:
    """Check what takes no time and runs no code of the user: model, tokenizer, names. Returns the model's folder.

    Raises UsageError with what to write instead.
    """
    if not settings.orchestrator.envs:
        raise UsageError("no environment to train on; add an [[orchestrator.envs]] table with an id")
    check_names(settings)
    model = resolve_model(settings.model.path, settings.model.family)
    load_config(model, settings.model.implementation)
    try:
        load_renderer(model, settings.model.renderer, settings.model.family)
    except HeadwayError as error:
        raise UsageError(str(error)) from None
    return model


def check_names(settings: RlSettings) -> None:
    """Check that the environments and the files of code that settings name are there. Raises UsageError."""
    for env in [*settings.orchestrator.envs, *settings.orchestrator.eval.envs]:
        check_environment(env.id)
    for setting, path in _named_files(settings, ""):
        check_object(path, setting)


def check_locks(settings: RlSettings, files: Iterable[Path]) -> None:
    """Check environments against the locks beside settings files, and in the current folder. Raises UsageError."""
    folders = dict.fromkeys(folder.resolve() for folder in (Path(), *(file.parent for file in files)))
    locks = [folder / LOCK_FILE for folder in folders if (folder / LOCK_FILE).is_file()]
    if not locks:
        return
    envs = [*settings.orchestrator.envs, *settings.orchestrator.eval.envs]
    modules = dict.fromkeys(top_module(env.id, env.args) for env in envs)
    check_locked(locks, [module for module in modules if module is not None])


def warnings(settings: RlSettings) -> Iterator[str]:
    """Say what is allowed, and hardly meant."""
    if settings.model.path in BUILT_IN:
        yield (
            f"model {settings.model.path!r} is built in and untrained: it writes random letters, and learns only from "
            "rewards that those differ in; warm it up with `headway sft` for a task (docs/sft.md)"
        )
    loss, lag = settings.trainer.loss, settings.orchestrator.max_lag
    if settings.model.compute == "fp8" and lag and isinstance(loss, Dppo) and loss.cap is None:
        yield (
            f"in FP8 the ratios of older tokens, which orchestrator.max_lag = {lag} allows, are mostly rounding, and "
            "slow learning down; trainer.loss.cap = 1.3 makes up for half of that, no lag for all (docs/precision.md)"
        )


def check_parts(settings: RlSettings) -> list[str]:
    """Load what a run would load: start every environment, import every part that is the user's own.

    Returns a line about each. Raises HeadwayError with the first that fails.
    """
    model = check_start(settings)
    family = load_config(model, settings.model.implementation).family
    renderer = load_renderer(model, settings.model.renderer, settings.model.family)
    lines = [f"model {settings.model.path}: {family}, renderer {type(renderer).__name__}"]
    lines += asyncio.run(_start_environments(settings, model))
    load_gates(settings.orchestrator.gates)
    load_filters(settings.orchestrator.filters.custom)
    _load_trainer_parts(settings.trainer)
    return [*lines, f"loss {getattr(settings.trainer.loss, 'path', settings.trainer.loss.type)}"]


def check_machine(settings: RlSettings) -> str:
    """Say how the run's processes would share this machine. Raises UsageError where it cannot run them."""
    if settings.inference.engine == "vllm" and find_spec("vllm") is None:
        raise UsageError("vLLM is not installed here; see `headway doctor`")
    return place_here(settings.placement, settings.inference).explanation


def _load_trainer_parts(trainer: TrainerSettings) -> None:
    """Import loss, optimizer and schedule where they are the user's own. Each needs torch, which takes seconds."""
    if isinstance(trainer.loss, CustomLoss):
        from headway.trainer.losses.registry import make_loss

        make_loss(trainer.loss)
    if isinstance(trainer.optim, CustomOptimizer):
        from headway.trainer.optimizers.optimizer import custom_rule

        custom_rule(trainer.optim)
    if isinstance(trainer.schedule, CustomSchedule):
        from headway.trainer.optimizers.schedules import rate_at

        first = trainer.schedule.warmup_steps + 1
        rate_at(trainer.schedule, first, first)


async def _start_environments(settings: RlSettings, model: Path) -> list[str]:
    options, renderer = settings.orchestrator, settings.model.renderer
    context = Context(list, lambda: load_renderer(model, renderer, settings.model.family))
    async with AsyncExitStack() as stack:
        pools = WorkerPools(stack, model, renderer, settings.model.family)
        sources = await pools.sources(options, settings.seed, context)
        for source in sources:
            stack.push_async_callback(source.algorithm.close)
        evals = await pools.eval_envs(options.eval.envs, options.sampling)
        found = [(source.name, source.tasks) for source in sources] + [(env.name, env.tasks) for env in evals]
        code = {used.name: ", ".join(map(str, used.code)) for used in pools.used()}
        return [f"environment {name}: {len(tasks)} tasks, {code[name]}" for name, tasks in found]


def _named_files(value: Any, setting: str) -> Iterator[tuple[str, str]]:
    """Yield the settings of the form `file.py:name`, with their names. Texts in free tables mean what they like."""
    if isinstance(value, BaseModel):
        for name in value.model_fields_set - {"name"}:  # an environment's is the id as the user wrote it
            yield from _named_files(getattr(value, name), f"{setting}.{name}".lstrip("."))
    elif isinstance(value, list | tuple):
        for index, item in enumerate(value):
            yield from _named_files(item, f"{setting}.{index}")
    elif isinstance(value, str) and ".py:" in value:
        yield setting, value
