"""Settings of the orchestrator: environments, batches, staleness, concurrency, evaluation."""

from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import Field, model_validator

from headway.config.algorithms import Algorithm, Grpo, KlPenalty, Opd, Opsd, Sft, is_group_relative
from headway.config.base import Plugin, Settings, broken_rule
from headway.config.context import ContextRule
from headway.config.shared import SharedSettings


class SamplingSettings(Settings):
    temperature: float = Field(default=1.0, ge=0)
    """Divides the logits; 0 always takes the likeliest token."""
    top_p: float = Field(default=1.0, gt=0, le=1)
    """Sample from the likeliest tokens that make up this share; 1 switches it off."""
    top_k: int = Field(default=0, ge=0)
    """Sample from this many likeliest tokens; 0 switches it off."""
    min_p: float = Field(default=0.0, ge=0, le=1)
    """Leave out tokens less likely than this share of the likeliest one."""
    max_tokens: int | None = Field(default=None, ge=1)
    """Tokens per reply. Default: up to the end of the context."""


class InOrder(Settings):
    """Tasks in the environment's own order, over and over."""

    type: Literal["in_order"] = "in_order"


class Shuffled(Settings):
    """Tasks in a random order, a new one each epoch."""

    type: Literal["shuffled"] = "shuffled"


class DifficultyPools(Settings):
    """Mostly tasks that the policy sometimes solves."""

    type: Literal["difficulty"] = "difficulty"
    easy: float = Field(default=0.9, ge=0, le=1)
    """Mean reward from which on a task counts as easy."""
    hard: float = Field(default=0.1, ge=0, le=1)
    """Mean reward up to which a task counts as hard."""
    easy_share: float = Field(default=0.1, ge=0, le=1)
    """Share of tasks drawn from the easy pool."""
    hard_share: float = Field(default=0.2, ge=0, le=1)
    """Share of tasks drawn from the hard pool."""

    @model_validator(mode="after")
    def _pools_apart(self) -> Self:
        if self.hard >= self.easy:
            raise broken_rule("hard", f"must be below easy, which is {self.easy} (got {self.hard})")
        if self.easy_share + self.hard_share > 1:
            raise broken_rule("hard_share", "and easy_share must not add up to more than 1: they are shares of a batch")
        return self


class CustomSampler(Plugin):
    """A generator of your own: it sees the tasks and yields the index of the next one."""

    type: Literal["sampler"] = "sampler"


class CustomCurriculum(Plugin):
    """A class of your own: it chooses the next task, and is told how each one went."""

    type: Literal["custom"] = "custom"


Curriculum = Annotated[
    InOrder | Shuffled | DifficultyPools | CustomSampler | CustomCurriculum, Field(discriminator="type")
]


class WorkerSettings(Settings):
    min: int = Field(default=1, ge=1)
    """Worker processes, at least."""
    max: int = Field(default=4, ge=1)
    """Worker processes; the pool grows and shrinks between the two."""
    episodes: int = Field(default=64, ge=1)
    """Episodes that one worker runs at a time."""
    memory_gb: float | None = Field(default=None, gt=0)
    """Memory limit of one worker."""
    pass_env: list[str] = []
    """Environment variables that workers get beside the usual ones, such as a judge's `OPENAI_API_KEY`: by default they
    get PATH, HOME, locale, Python's, proxies and the like, and none that looks like a secret."""

    @model_validator(mode="after")
    def _ordered(self) -> Self:
        if self.min > self.max:
            raise broken_rule("min", f"must be at most max, which is {self.max} (got {self.min})")
        return self


class EnvSettings(Settings):
    id: str
    """A bundled or installed environment's name, an import path `module:Name`, or a file `path.py:Name`."""
    name: str | None = None
    """Name in records and metrics. Default: the id."""
    args: dict[str, Any] = {}
    """Keyword arguments of the environment."""
    task_set: Path | None = None
    """A file of tasks to take, in its order, as `headway env filter NAME` writes it. Default: all."""
    ratio: float = Field(default=1.0, gt=0)
    """Share of episodes relative to the other environments."""
    algorithm: Algorithm | None = None
    """Default: the orchestrator's."""
    group_size: int | None = Field(default=None, ge=1)
    """Default: the orchestrator's."""
    sampling: SamplingSettings | None = None
    """Default: the orchestrator's."""
    curriculum: Curriculum = Shuffled()
    """The order in which tasks are drawn."""
    workers: WorkerSettings = WorkerSettings()
    """The processes that run episodes."""
    timeout: float = Field(default=600.0, gt=0)
    """Seconds an episode may take."""
    turn_timeout: float | None = Field(default=None, gt=0)
    """Seconds that one reply of the policy may take. Default: as long as the episode."""
    context: ContextRule | None = None
    """The rule that keeps conversations short. Default: the environment's own, where it has one."""
    rate_limit: float | None = Field(default=None, gt=0)
    """Episodes started per second, at most."""


class EvalEnvSettings(EnvSettings):
    tasks: int | None = Field(default=None, ge=1)
    """Tasks per evaluation. Default: all."""
    samples: int = Field(default=1, ge=1)
    """Episodes per task: the k of avg@k and pass@k."""


class EvalSettings(Settings):
    envs: list[EvalEnvSettings] = []
    """Environments to evaluate on."""
    interval: int | None = Field(default=None, ge=1)
    """Steps between evaluations. Default: only at start and end."""
    at_start: bool = True
    """Evaluate the initial policy."""
    at_end: bool = True
    """Evaluate the final policy."""


class ConcurrencySettings(Settings):
    min: int = Field(default=8, ge=1)
    """Episodes in flight, at least."""
    max: int = Field(default=1024, ge=1)
    """Episodes in flight, at most."""
    initial: int = Field(default=64, ge=1)
    """Episodes in flight at the start; kept within min and max."""
    kv_low: float = Field(default=0.7, ge=0, le=1)
    """Grow while KV usage is below this."""
    kv_high: float = Field(default=0.9, ge=0, le=1)
    """Stop admitting above this."""

    @model_validator(mode="after")
    def _ordered(self) -> Self:
        if self.min > self.max:
            raise broken_rule("min", f"must be at most max, which is {self.max} (got {self.min})")
        if self.kv_low > self.kv_high:
            raise broken_rule("kv_low", f"must be at most kv_high, which is {self.kv_high} (got {self.kv_low})")
        return self


class RareTokenFilter(Settings):
    """Finds gibberish: tokens that texts hardly have, sampled against the odds (https://arxiv.org/abs/2510.02387)."""

    token_id: int = Field(default=100_000, ge=0)
    """Ids above this are rare: tokenizers number their tokens from the most common on."""
    logprob: float = Field(default=-14.0, lt=0)
    """A rare token below this logprob is gibberish; for 150,000 tokens, even odds are -11.9."""


class CertainRunFilter(Settings):
    """Finds loops: long stretches of which every token was certain (https://arxiv.org/abs/2506.13585)."""

    length: int = Field(default=3000, ge=1)
    """Tokens in a row."""
    probability: float = Field(default=0.99, gt=0, lt=1)
    """Each was sampled with more than this probability."""


class FilterSettings(Settings):
    zero_advantage: bool = True
    """Drop groups in which every episode has the same reward."""
    truncated: bool = False
    """Drop episodes that ran into the length limit."""
    gibberish: float | None = None
    """Drop samples whose mean logprob is below this."""
    repetition: float | None = Field(default=None, ge=0, le=1)
    """Drop samples in which more than this share of 8-grams repeat."""
    rare_tokens: RareTokenFilter | None = None
    """Drop samples that have a rare and very unlikely token; `{}` for the defaults."""
    certain_run: CertainRunFilter | None = None
    """Drop samples that have a long run of certain tokens; `{}` for the defaults."""
    custom: list[str] = []
    """Functions of your own that get a `Rollout` and return whether to keep it (docs/bring_your_own.md)."""


LIVE_TEACHER = "is the live policy's own server, but a teacher is a frozen model; serve it elsewhere, or use opsd"


class OrchestratorSettings(Settings):
    envs: list[EnvSettings] = []
    """Training environments."""
    batch_size: int = Field(default=128, ge=1)
    """Episodes per optimizer step."""
    group_size: int = Field(default=16, ge=1)
    """Episodes per task that are compared with each other."""
    algorithm: Algorithm = Grpo()
    """How rewards become training signals."""
    kl: KlPenalty | None = None
    """Keep the policy near a frozen model."""
    sampling: SamplingSettings = SamplingSettings()
    """How replies are sampled."""
    max_lag: int = Field(default=8, ge=0)
    """Oldest policy a batch may hold, in versions behind the trainer's."""
    run_ahead: int = Field(default=1, ge=0)
    """Batches the orchestrator may be ahead of the trainer."""
    max_lost_share: float = Field(default=0.1, ge=0, lt=1)
    """Share of the episodes that may be given up as too old; for more, the trainer waits. 0: wait for every one."""
    concurrency: ConcurrencySettings = ConcurrencySettings()
    """How many episodes are in flight."""
    filters: FilterSettings = FilterSettings()
    """Which groups and episodes are left out of training."""
    gates: list[str] = []
    """Functions of your own that get a `Group` and return whether it may be trained (docs/bring_your_own.md)."""
    eval: EvalSettings = EvalSettings()
    """Evaluation during the run."""
    engines: list[Annotated[str, Field(pattern=r"^https?://[^/\s]+")]] = []
    """Base URLs of engines. Default: those that the run starts."""
    swarm: bool = False
    """Also train verified groups of a swarm (docs/swarm.md), which `headway swarm serve RUN` brings."""
    max_error_share: float = Field(default=0.9, gt=0, le=1)
    """Stop when more than this share of the last 256 episodes failed."""
    max_empty_batches: int = Field(default=50, ge=1)
    """Stop after collecting this many batches' worth of episodes without any signal."""
    record_rollouts: bool = True
    """Keep trained episodes in the run folder, for people to read and for `headway replay`."""
    journal_mb: int = Field(default=256, ge=0)
    """Keep a journal for `headway replay`, of at most this many megabytes: some 20 million episodes. 0: keep none."""

    def algorithms(self) -> Iterator[tuple[str, Algorithm]]:
        """Every algorithm that trains, with the name of the setting it came from."""
        yield from {setting: algorithm for setting, algorithm, _, _ in self._choices()}.items()

    def _choices(self) -> Iterator[tuple[str, Algorithm, str, int]]:
        """Every (algorithm, group size) that trains, each with the name of the setting it came from."""
        if not self.envs:
            yield "algorithm", self.algorithm, "group_size", self.group_size
        for index, env in enumerate(self.envs):
            here = f"envs.{index}."
            yield (
                f"{here}algorithm" if env.algorithm else "algorithm",
                env.algorithm or self.algorithm,
                f"{here}group_size" if env.group_size else "group_size",
                env.group_size or self.group_size,
            )

    @model_validator(mode="after")
    def _groups_have_baselines(self) -> Self:
        for _, algorithm, setting, size in self._choices():
            if size == 1 and is_group_relative(algorithm):
                raise broken_rule(
                    setting,
                    f'must be at least 2 for algorithm "{algorithm.type}" (got 1): a group of one has no baseline',
                )
        return self

    @model_validator(mode="after")
    def _batches_hold_whole_groups(self) -> Self:
        for _, _, setting, size in self._choices():
            if self.batch_size % size:
                raise broken_rule(
                    "batch_size",
                    f"must be a multiple of {setting}, which is {size} (got {self.batch_size}): "
                    "a batch holds whole groups",
                )
        return self

    @model_validator(mode="after")
    def _teachers_are_frozen(self) -> Self:
        for setting, algorithm in self.algorithms():
            if not isinstance(algorithm, Opd | Sft):
                continue
            if algorithm.teacher is None:
                raise broken_rule(
                    f"{setting}.teacher",
                    f'is missing: algorithm "{algorithm.type}" needs a frozen model; set {setting}.teacher.base_url',
                )
            if algorithm.teacher.is_served_by(self.engines):
                raise broken_rule(f"{setting}.teacher.base_url", LIVE_TEACHER)
        return self

    @model_validator(mode="after")
    def _reference_is_frozen(self) -> Self:
        if self.kl is None:
            return self
        if self.kl.reference.is_served_by(self.engines):
            raise broken_rule("kl.reference.base_url", LIVE_TEACHER)
        for setting, algorithm in self.algorithms():
            if isinstance(algorithm, Opd | Opsd | Sft):
                raise broken_rule(
                    "kl", f'must be left out with {setting}.type = "{algorithm.type}", which has a teacher of its own'
                )
        return self

    @model_validator(mode="after")
    def _names_differ(self) -> Self:
        for where, envs in (("envs", self.envs), ("eval.envs", self.eval.envs)):
            names = [env.name or env.id for env in envs]
            for index, name in enumerate(names):
                if name in names[:index]:
                    raise broken_rule(f"{where}.{index}.name", f"must differ from the others': {name!r} is taken")
        return self


class OrchestrateSettings(SharedSettings):
    """Settings of `headway orchestrate`."""

    orchestrator: OrchestratorSettings = OrchestratorSettings()
    """The orchestrator."""

    @model_validator(mode="after")
    def _replies_fit(self) -> Self:
        samplings = {f"orchestrator.envs.{i}.sampling": env.sampling for i, env in enumerate(self.orchestrator.envs)}
        for where, sampling in {"orchestrator.sampling": self.orchestrator.sampling, **samplings}.items():
            if sampling and sampling.max_tokens and sampling.max_tokens > self.seq_len:
                raise broken_rule(
                    f"{where}.max_tokens",
                    f"must be at most seq_len, which is {self.seq_len} (got {sampling.max_tokens})",
                )
        return self
