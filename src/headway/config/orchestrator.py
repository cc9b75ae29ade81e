"""Settings of the orchestrator: environments, batches, staleness, concurrency, evaluation."""

from typing import Annotated, Any, Literal

from pydantic import Field

from headway.config.algorithms import Algorithm, Grpo
from headway.config.base import Settings
from headway.config.shared import SharedSettings


class SamplingSettings(Settings):
    temperature: float = Field(default=1.0, ge=0)
    top_p: float = Field(default=1.0, gt=0, le=1)
    top_k: int = Field(default=0, ge=0)
    min_p: float = Field(default=0.0, ge=0, le=1)
    max_tokens: int | None = Field(default=None, ge=1)
    """Tokens per reply. Default: up to the end of the context."""


class InOrder(Settings):
    type: Literal["in_order"] = "in_order"


class Shuffled(Settings):
    type: Literal["shuffled"] = "shuffled"


class DifficultyPools(Settings):
    type: Literal["difficulty"] = "difficulty"
    easy: float = Field(default=0.9, ge=0, le=1)
    """Mean reward from which on a task counts as easy."""
    hard: float = Field(default=0.1, ge=0, le=1)
    """Mean reward up to which a task counts as hard."""
    easy_share: float = Field(default=0.1, ge=0, le=1)
    hard_share: float = Field(default=0.2, ge=0, le=1)


class CustomCurriculum(Settings):
    type: Literal["custom"] = "custom"
    path: str
    """Import path of the class, `package.module:Name`."""
    args: dict[str, Any] = {}


Curriculum = Annotated[InOrder | Shuffled | DifficultyPools | CustomCurriculum, Field(discriminator="type")]


class WorkerSettings(Settings):
    min: int = Field(default=1, ge=1)
    max: int = Field(default=4, ge=1)
    """Worker processes; the pool grows and shrinks between the two."""
    episodes: int = Field(default=64, ge=1)
    """Episodes that one worker runs at a time."""
    memory_gb: float | None = Field(default=None, gt=0)
    """Memory limit of one worker."""


class EnvSettings(Settings):
    id: str
    """A bundled or installed environment's name, an import path `module:Name`, or a file `path.py:Name`."""
    name: str | None = None
    """Name in records and metrics. Default: the id."""
    args: dict[str, Any] = {}
    """Keyword arguments of the environment."""
    ratio: float = Field(default=1.0, gt=0)
    """Share of episodes relative to the other environments."""
    algorithm: Algorithm | None = None
    """Default: the orchestrator's."""
    group_size: int | None = Field(default=None, ge=1)
    """Default: the orchestrator's."""
    sampling: SamplingSettings | None = None
    """Default: the orchestrator's."""
    curriculum: Curriculum = Shuffled()
    workers: WorkerSettings = WorkerSettings()
    timeout: float = Field(default=600.0, gt=0)
    """Seconds an episode may take."""
    rate_limit: float | None = Field(default=None, gt=0)
    """Episodes started per second, at most."""


class EvalEnvSettings(EnvSettings):
    tasks: int | None = Field(default=None, ge=1)
    """Tasks per evaluation. Default: all."""
    samples: int = Field(default=1, ge=1)
    """Episodes per task: the k of avg@k and pass@k."""


class EvalSettings(Settings):
    envs: list[EvalEnvSettings] = []
    interval: int | None = Field(default=None, ge=1)
    """Steps between evaluations. Default: only at start and end."""
    at_start: bool = True
    at_end: bool = True


class ConcurrencySettings(Settings):
    min: int = Field(default=8, ge=1)
    max: int = Field(default=1024, ge=1)
    initial: int = Field(default=64, ge=1)
    kv_low: float = Field(default=0.7, ge=0, le=1)
    """Grow while KV usage is below this."""
    kv_high: float = Field(default=0.9, ge=0, le=1)
    """Stop admitting above this."""


class FilterSettings(Settings):
    zero_advantage: bool = True
    """Drop groups in which every episode has the same reward."""
    truncated: bool = False
    """Drop episodes that ran into the length limit."""
    gibberish: float | None = None
    """Drop samples whose mean logprob is below this."""
    repetition: float | None = Field(default=None, ge=0, le=1)
    """Drop samples in which more than this share of 8-grams repeat."""


class OrchestratorSettings(Settings):
    envs: list[EnvSettings] = []
    """Training environments."""
    batch_size: int = Field(default=128, ge=1)
    """Episodes per optimizer step."""
    group_size: int = Field(default=16, ge=1)
    """Episodes per task that are compared with each other."""
    algorithm: Algorithm = Grpo()
    sampling: SamplingSettings = SamplingSettings()
    max_lag: int = Field(default=8, ge=0)
    """Oldest policy a batch may hold, in versions behind the trainer's."""
    run_ahead: int = Field(default=1, ge=0)
    """Batches the orchestrator may be ahead of the trainer."""
    concurrency: ConcurrencySettings = ConcurrencySettings()
    filters: FilterSettings = FilterSettings()
    gates: list[str] = []
    """Import paths of functions that may refuse a group before it is trained."""
    eval: EvalSettings = EvalSettings()
    engines: list[str] = []
    """Base URLs of engines. Default: those that the run starts."""
    max_error_share: float = Field(default=0.9, gt=0, le=1)
    """Stop when more than this share of the last 256 episodes failed."""
    max_empty_batches: int = Field(default=50, ge=1)
    """Stop after collecting this many batches' worth of episodes without any signal."""
    record_rollouts: bool = True


class OrchestrateSettings(SharedSettings):
    """Settings of `headway orchestrate`."""

    orchestrator: OrchestratorSettings = OrchestratorSettings()
