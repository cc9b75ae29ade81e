"""Settings that more than one process reads. Each is defined here, once."""

import re
from pathlib import Path
from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from headway.config.base import Settings, broken_rule
from headway.core.routing import Role


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
    """Also send settings, metrics and rollouts of the run to Weights & Biases (extra `tracking`)."""
    prometheus_port: int | None = Field(default=None, ge=0, le=65535)
    """Also answer `GET /metrics` at this port with the latest values; 0 picks a free one. One for the whole run."""
    prometheus_host: str = "127.0.0.1"
    """Address at which it listens: one that a cluster's Prometheus reaches, 0.0.0.0 for all. It asks for no token."""


class LoraSettings(Settings):
    rank: int = Field(default=16, ge=1)
    """Rank of the adapter."""
    alpha: float = 32.0
    """The adapter's output is scaled by alpha / rank."""
    dropout: float = Field(default=0.0, ge=0.0, lt=1.0)
    """Dropout on the adapter's input while training."""
    targets: list[str] = Field(
        default=[
            *("q_proj", "k_proj", "v_proj", "qkv_proj", "o_proj"),
            *("q_a_proj", "q_b_proj", "kv_a_proj_with_mqa"),
            *("in_proj", "in_proj_qkv", "in_proj_z", "in_proj_qkvz", "out_proj"),
            *("gate_proj", "up_proj", "gate_up_proj", "down_proj"),
        ],
        min_length=1,
    )
    """Names of the linear layers that get an adapter, as far as the model has them. `experts`: all routed experts of
    every layer, each with its own of this rank. Of latent attention, `kv_b_proj` is left out: vLLM would ignore it."""


class ModelSettings(Settings):
    path: str = "tiny"
    """A checkpoint folder, a model of the Hugging Face hub as owner/name or owner/name@revision (docs/hub.md), or a
    built-in: tiny, tiny-llama, tiny-moe, tiny-glm4-moe, tiny-gpt-oss, tiny-hybrid."""
    family: str | None = None
    """Class of a model family that Headway does not bring along, as FILE.py:CLASS or MODULE:CLASS (docs/models.md)."""
    implementation: Literal["headway", "transformers"] = "headway"
    """Whose code runs the model. transformers: Hugging Face's own, for causal models that no family here is of; slower,
    and without context and expert parallelism (docs/models.md)."""
    renderer: str = "auto"
    """Renderer of messages to tokens: auto, template, a ChatML style, a format of the `renderers` package, or a class
    of your own, FILE.py:CLASS or MODULE:CLASS (docs/bring_your_own.md)."""
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    """Precision of computation. auto: bfloat16 on CUDA, float32 on CPU. Master weights are always float32."""
    compute: Literal["dtype", "fp8"] = "dtype"
    """Precision of the products of linear layers. dtype: that of `dtype`. fp8: FP8 with block scales; master weights,
    the head, routers, norms and attention stay as they are (docs/precision.md)."""
    lora: LoraSettings | None = None
    """Train an adapter instead of all weights."""
    vision_tower: Literal["frozen", "trained", "lora"] = "frozen"
    """Training of the vision tower, of models that have one: it stays as it is; all of its weights are trained; or
    `lora` also adapts those of its linear layers that `lora.targets` names (docs/models.md)."""

    @model_validator(mode="after")
    def _one_implementation(self) -> Self:
        if self.family is not None and self.implementation == "transformers":
            raise broken_rule(
                "family", 'is a class of Headway\'s, which model.implementation = "transformers" leaves out'
            )
        if (self.vision_tower == "lora" and self.lora is None) or (self.vision_tower == "trained" and self.lora):
            given = "with" if self.lora else "without"
            raise broken_rule("vision_tower", f'cannot be "{self.vision_tower}" {given} model.lora')
        if self.compute == "fp8" and self.implementation == "transformers":
            raise broken_rule("compute", 'must be "dtype" with model.implementation = "transformers"')
        return self


class PlacementSettings(Settings):
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Device that models run on. auto: CUDA where there is one."""
    trainer_ranks: int = Field(default=1, ge=1)
    """Processes of the trainer's group."""
    engines: int = Field(default=1, ge=1)
    """Inference servers that the run starts."""
    prefill_engines: int = Field(default=0, ge=0)
    """Of these, the ones that only prefill; the others then only decode, and get the KV from them. 0: all do both."""

    data_ranks: int | None = Field(default=None, ge=1)
    """Parts that each batch is packed into; None: one for each trainer rank, or for each group of ranks that share
    sequences (`trainer.parallel.context`), which `headway rl` tells the orchestrator."""

    @model_validator(mode="after")
    def _someone_decodes(self) -> Self:
        if self.prefill_engines >= self.engines:
            raise broken_rule(
                "prefill_engines",
                f"must be less than engines, which is {self.engines} (got {self.prefill_engines}): some must decode",
            )
        return self

    def role(self, engine: int) -> Role | None:
        """Return the part that engine number `engine` has; None where that is for the engine's own settings to say."""
        if not self.prefill_engines:
            return None
        return "prefill" if engine < self.prefill_engines else "decode"

    @property
    def batch_parts(self) -> int:
        """Parts that the orchestrator packs each batch into."""
        return self.data_ranks or self.trainer_ranks


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
    """From the memory of the trainer's processes, in a tree of engines: NCCL between two GPUs, gloo otherwise."""

    type: Literal["point_to_point"] = "point_to_point"
    host: str = "127.0.0.1"
    """Address at which the trainer listens for engines."""


class HttpWeights(Settings):
    """Over HTTP from the hosts of the trainer, in a tree of engines, with the run's token."""

    type: Literal["http"] = "http"
    host: str | None = None
    """Address at which each host of the trainer serves. Default: the one that the run's other hosts reach."""
    port: int = Field(default=0, ge=0, le=65535)
    """Port; 0 picks a free one."""
    keep_last: int = Field(default=2, ge=1)
    """Published versions kept on disk, at least two."""


class SharedMemoryWeights(Settings):
    """Through shared memory of one host, or of one GPU."""

    type: Literal["shared_memory"] = "shared_memory"


RolloutTransport = Annotated[FilesystemRollouts | ZmqRollouts, Field(discriminator="type")]
WeightTransport = Annotated[
    FilesystemWeights | PointToPointWeights | HttpWeights | SharedMemoryWeights, Field(discriminator="type")
]


class TlsSettings(Settings):
    certificate: Path | None = None
    """This host's certificate, a PEM file with the whole chain: control service, weights and engines speak TLS then,
    except at loopback addresses. It must hold the address or name by which others reach the host."""
    key: Path | None = None
    """Its private key, a PEM file without a password that only you can read."""

    @model_validator(mode="after")
    def _both_or_none(self) -> Self:
        if (self.certificate is None) != (self.key is None):
            missing = "key" if self.key is None else "certificate"
            raise broken_rule(missing, "is missing: TLS needs a certificate and its key")
        return self


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
    tls: TlsSettings = TlsSettings()
    """Encryption of what other hosts reach."""
    seq_len: int = Field(default=2048, ge=8)
    """Longest sequence, in tokens, that is served and trained; also the size of a packed micro-batch."""
    max_steps: int = Field(default=100, ge=1, lt=2**31)
    """Optimizer steps of the run."""
    seed: int = 0
    """Seed of everything random."""
