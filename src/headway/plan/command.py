"""`headway plan` from its settings to the question: which model, episodes and devices, and how fast they are."""

from collections.abc import Callable
from dataclasses import replace

from headway.base.devices import query_gpus
from headway.base.errors import UsageError
from headway.base.gpus import GPUS
from headway.base.processes import usable_cores
from headway.config.rl import RlSettings
from headway.models.configs.config import ModelConfig
from headway.models.registry import load_config
from headway.models.tiny import resolve_model
from headway.plan.calibration import Say, calibrate, find_calibration, threads_of
from headway.plan.episodes import Figures, Workload
from headway.plan.fitting import Measured, fit_to_run
from headway.plan.gpus import assumptions, find_gpu, gpu_speeds, rank_memory
from headway.plan.planning import Question, SpeedsOf
from headway.plan.speeds import Speeds
from headway.plan.splits import Split, gpu_splits, own_split

MOST_CPU_ENGINES = 4


def default_figures(settings: RlSettings) -> Figures:
    """Episodes of which nothing is known: one turn, half of what a reply may have."""
    longest = min(settings.orchestrator.sampling.max_tokens or settings.seq_len // 2, settings.seq_len - 1)
    return Figures(prompt=min(256, settings.seq_len // 4), reply=max(1, longest // 2))


def check_settings(settings: RlSettings) -> None:
    """Raise UsageError for settings that nothing can be planned from."""
    if not settings.orchestrator.envs:
        raise UsageError("no environment to plan for; add an [[orchestrator.envs]] table with an id")


def ask_for_gpus(
    settings: RlSettings, workload: Workload, name: str, gpus: int | None, seen: Measured | None
) -> Question:
    """The question for GPUs that are known by name: any split of `gpus`, or the settings' own."""
    check_settings(settings)
    known, gpu = find_gpu(name)
    config = _model_config(settings)
    settings = _in_bfloat16(settings)
    own = own_split(settings)
    total = own.devices if gpus is None else gpus
    splits = gpu_splits(settings, config, gpu, total)
    speeds_of: SpeedsOf = lambda one: gpu_speeds(one, config, gpu)  # noqa: E731
    if seen is not None:
        speeds_of = _fitted(speeds_of, settings, workload, seen)
    return Question(
        settings=settings,
        workload=workload,
        splits=splits,
        own=own if total == own.devices else None,
        speeds_of=speeds_of,
        memory_of=lambda one: rank_memory(one, config, gpu),
        device=known,
        device_hour=settings.cost.gpu_hour,
        assumptions=[*_model_lines(settings, config), *assumptions(known, gpu), *_fit_lines(seen)],
        measured=seen,
    )


def ask_for_this_machine(
    settings: RlSettings, workload: Workload, say: Say, seen: Measured | None, *, again: bool = False
) -> Question:
    """The question for this machine, whose engine and trainer are measured if they have not been, or once more."""
    check_settings(settings)
    found = None if again else find_calibration(settings)
    calibration = found or calibrate(settings, say)
    own = own_split(settings)
    on_cpu = calibration.device == "cpu"
    engines = range(1, MOST_CPU_ENGINES + 1) if on_cpu else range(1, own.engines + 1)
    splits = [Split(own.trainer_ranks, count, own.gpus_each) for count in {*engines, own.engines}]
    speeds_of: SpeedsOf = calibration.speeds
    if seen is not None:
        speeds_of = _fitted(speeds_of, settings, workload, seen)
    cores = usable_cores()
    hour = settings.cost.core_hour * threads_of(settings, cores) if on_cpu else settings.cost.gpu_hour
    return Question(
        settings=settings,
        workload=workload,
        splits=sorted(splits, key=lambda split: split.engines),
        own=own,
        speeds_of=speeds_of,
        memory_of=lambda one: None,
        device=f"{cores} cores" if on_cpu else "this machine's GPUs",
        device_hour=hour,
        assumptions=[*calibration.lines(), *_fit_lines(seen)],
        measured=seen,
    )


def gpu_here() -> str | None:
    """Return the known name of this machine's first GPU."""
    names = [name for (name,) in query_gpus("name")]
    return next((known for name in names for known in GPUS if known in name), None)


def _fitted(
    speeds_of: SpeedsOf, settings: RlSettings, workload: Workload, seen: Measured
) -> Callable[[RlSettings], Speeds]:
    """Speeds of any split, as much slower than expected as those of the run were."""
    expected = speeds_of(settings)
    fitted = fit_to_run(settings, expected, workload, seen)
    replies, training = (
        after.slower / before.slower
        for before, after in ((expected.engine, fitted.engine), (expected.trainer, fitted.trainer))
    )

    def speeds(one: RlSettings) -> Speeds:
        plain = speeds_of(one)
        engine = replace(plain.engine, update_seconds=seen.update_seconds).times(replies)
        trainer = replace(plain.trainer, publish_seconds=seen.publish_seconds).times(training)
        return replace(plain, engine=engine, trainer=trainer)

    return speeds


def _fit_lines(seen: Measured | None) -> list[str]:
    if seen is None:
        return []
    return [
        f"engines and trainer are as fast as the run's were: {seen.episode_engine_seconds:.2f} s an episode for "
        f"replies, {seen.training_seconds:.2f} s a step for training, {seen.update_seconds:.2f} s for an update"
    ]


def _model_config(settings: RlSettings) -> ModelConfig:
    folder = resolve_model(settings.model.path, settings.model.family, weights=False)
    return load_config(folder, settings.model.implementation)


def _model_lines(settings: RlSettings, config: ModelConfig) -> list[str]:
    from headway.models.costs import active_parameter_count, parameter_count

    adapter = "" if settings.model.lora is None else f", an adapter of rank {settings.model.lora.rank}"
    active = f", {active_parameter_count(config) / 1e9:.1f}B of them for each token" if config.experts else ""
    return [
        f"{settings.model.path}: {parameter_count(config) / 1e9:.3g}B weights{active}, in bfloat16{adapter}; "
        f"sequences of {settings.seq_len:,} tokens"
    ]


def _in_bfloat16(settings: RlSettings) -> RlSettings:
    """Resolve "auto" as on a GPU."""
    if settings.model.dtype != "auto":
        return settings
    return settings.model_copy(update={"model": settings.model.model_copy(update={"dtype": "bfloat16"})})
