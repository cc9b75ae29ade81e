"""Settings that more than one process reads. Each is defined here, once."""

import re
from pathlib import Path
from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from headway.config.base import Settings, broken_rule


class RunSettings(Settings):
    name: str | None = None
    """Name of the run and of its folder. Default: date, time and the command."""
    output_dir: Path = Path("outputs")
    """Folder in which run folders are made."""

    @model_validator(mode="after")
    def _name_is_a_folder_name(self) -> Self:
        if self.name is not None and not re.fullmatch(r"\w[\w.-]{0,99}", self.name):
            raise broken_rule(
                "name",
                f"is a folder's name: letters, digits, '_', '.' and '-', at most 100, no '.' or '-' first "
                f"(got {self.name!r}); --run.output_dir says where it goes",
            )
        return self


class LogSettings(Settings):
    level: Literal["DEBUG", "INFO", "WARNING", "ERROR"] = "INFO"
    """Lowest level of messages that are shown."""
    json_lines: bool = False
    """One JSON object per line, on the console and in files, instead of text."""


class WandbSettings(Settings):
    project: str = "headway"
    """Project that the run appears in."""
    entity: str | None = None
    """Team or user. Default: the account's."""
    tags: list[str] = []
    """Tags of the run."""
    mode: Literal["online", "offline"] = "online"
    """offline: keep everything in the run folder, to be synced later."""


class TrackingSettings(Settings):
    tensorboard: bool = False
    """Also write TensorBoard events, to the run's metrics folder (extra `tracking`)."""
    wandb: WandbSettings | None = None
    """Also send metrics to Weights & Biases (extra `tracking`)."""
    prometheus_port: int | None = Field(default=None, ge=0, le=65535)
    """Also answer `GET /metrics` at this port with the latest values; 0 picks a free one. Per process."""


class LoraSettings(Settings):
    rank: int = Field(default=16, ge=1)
    """Rank of the adapter."""
    alpha: float = 32.0
    """The adapter's output is scaled by alpha / rank."""
    dropout: float = Field(default=0.0, ge=0.0, lt=1.0)
    """Dropout on the adapter's input while training."""
    targets: list[str] = Field(
        default=["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"], min_length=1
    )
    """Names of the linear layers that get an adapter."""


class ModelSettings(Settings):
    path: str = "tiny"
    """A checkpoint folder, or the name of a built-in: tiny, tiny-llama, tiny-moe."""
    family: str | None = None
    """Class of a model family that Headway does not bring along, as FILE.py:CLASS or MODULE:CLASS (docs/models.md)."""
    renderer: str = "auto"
    """Renderer of messages to tokens: auto, template, a ChatML style, or a format of the `renderers` package."""
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    """Precision of computation. auto: bfloat16 on CUDA, float32 on CPU. Master weights are always float32."""
    lora: LoraSettings | None = None
    """Train an adapter instead of all weights."""


class PlacementSettings(Settings):
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Device that models run on. auto: CUDA where there is one."""
    trainer_ranks: int = Field(default=1, ge=1)
    """Processes of the trainer's group."""
    engines: int = Field(default=1, ge=1)
    """Inference servers that the run starts."""

    @property
    def data_ranks(self) -> int:
        """Ranks that read different parts of a batch: every rank of the trainer, as long as none share a sequence."""
        return self.trainer_ranks


class FilesystemRollouts(Settings):
    """Through the run folder."""

    type: Literal["filesystem"] = "filesystem"


class ZmqRollouts(Settings):
    """Over a socket."""

    type: Literal["zmq"] = "zmq"
    address: str = "tcp://127.0.0.1:0"
    """Address at which the orchestrator listens; port 0 picks a free one, written into the run's control folder."""


class FilesystemWeights(Settings):
    """Through safetensors files in the run folder."""

    type: Literal["filesystem"] = "filesystem"
    keep_last: int = Field(default=2, ge=1)
    """Published versions kept on disk, at least two."""


class PointToPointWeights(Settings):
    """From the memory of each trainer process to each engine: NCCL between two GPUs, gloo otherwise."""

    type: Literal["point_to_point"] = "point_to_point"
    host: str = "127.0.0.1"
    """Address at which the trainer listens for engines."""


class SharedMemoryWeights(Settings):
    """Through shared memory of one host, or of one GPU."""

    type: Literal["shared_memory"] = "shared_memory"


RolloutTransport = Annotated[FilesystemRollouts | ZmqRollouts, Field(discriminator="type")]
WeightTransport = Annotated[FilesystemWeights | PointToPointWeights | SharedMemoryWeights, Field(discriminator="type")]


class SharedSettings(Settings):
    run: RunSettings = RunSettings()
    """Name and folder of the run."""
    log: LogSettings = LogSettings()
    """Level and format of log messages."""
    tracking: TrackingSettings = TrackingSettings()
    """Destinations of metrics besides the run's JSON lines."""
    model: ModelSettings = ModelSettings()
    """The model that is trained and served."""
    placement: PlacementSettings = PlacementSettings()
    """Number of processes, and their device."""
    rollouts: RolloutTransport = FilesystemRollouts()
    """Transport of batches to the trainer."""
    weights: WeightTransport = FilesystemWeights()
    """Transport of weights to the engines."""
    seq_len: int = Field(default=2048, ge=8)
    """Longest sequence, in tokens, that is served and trained; also the size of a packed micro-batch."""
    max_steps: int = Field(default=100, ge=1)
    """Optimizer steps of the run."""
    seed: int = 0
    """Seed of everything random."""
