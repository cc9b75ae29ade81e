"""Settings of the trainer."""

from typing import Literal, Self

from pydantic import Field, model_validator

from headway.config.base import Settings, broken_rule
from headway.config.losses import Dppo, Loss, SequenceMask
from headway.config.optimizers import AdamW, Constant, Linear, Optimizer, Schedule
from headway.config.shared import SharedSettings


class ActivationSettings(Settings):
    checkpoint: Literal["off", "selective", "full"] = "off"
    """Which activations are recomputed in the backward pass instead of kept."""
    attention_layers: int | None = Field(default=None, ge=0)
    """With "selective": in how many layers attention's output is kept, and rows that other ranks sent to the experts
    here; None: all. The others compute and exchange again."""
    offload: bool = False
    """Keep checkpointed activations in CPU memory."""

    @model_validator(mode="after")
    def _something_to_offload(self) -> Self:
        if self.offload and self.checkpoint == "off":
            raise broken_rule("offload", 'needs checkpoint = "selective" or "full": only checkpoints are offloaded')
        return self


class CheckpointSettings(Settings):
    interval: int = Field(default=20, ge=1)
    """Steps between two checkpoints."""
    keep_last: int = Field(default=2, ge=1)
    """Newest checkpoints kept on disk."""
    keep_interval: int | None = Field(default=None, ge=1)
    """Also keep every checkpoint whose step is a multiple of this."""
    export_interval: int | None = Field(default=None, ge=1)
    """Steps between two Hugging Face exports; one is always made at the end."""
    copies: int = Field(default=2, ge=1)
    """Hosts that keep each part of a checkpoint, where the trainer's hosts share no folder: the one that wrote it, and
    the next ones. All but one of them may be lost."""
    remote: str | None = None
    """Folder on another disk or fsspec URL, such as s3://bucket/my-run: every complete checkpoint and every export is
    copied there, and a trainer that has lost its disk continues from the newest whole one. One run has it alone."""


class FakeData(Settings):
    micro_batches: int = Field(default=1, ge=1)
    """Micro-batches per rank and step."""
    mean_len: int | None = None
    """Mean of log-normal sample lengths; None: one sequence of seq_len per micro-batch."""


class ParallelSettings(Settings):
    """Dimensions over which the trainer's ranks are laid out (docs/scaling.md); what is left shards the weights."""

    replicate: int = Field(default=1, ge=1)
    """Replicate over this many groups and shard within each (hybrid sharding)."""
    context: int = Field(default=1, ge=1)
    """Ranks that share each sequence: for samples whose activations do not fit one rank."""
    expert: int = Field(default=1, ge=1)
    """Ranks that share the experts of each layer, among those of one copy of the weights: for mixtures of experts."""


ExpertExchange = Literal["all_to_all", "deep_ep"]


class ExpertSettings(Settings):
    """Mixtures of experts (docs/scaling.md)."""

    balance: Literal["off", "bias", "loss"] = "off"
    """How tokens are spread evenly. bias: routers' selection biases move after every step; loss: an auxiliary loss."""
    bias_rate: float = Field(default=1e-3, gt=0)
    """With "bias": what is added to the bias of experts below the mean load, and taken from those above it."""
    loss_weight: float = Field(default=1e-3, gt=0)
    """With "loss": weight of the auxiliary loss, which is 1 in each layer where the load is even."""
    exchange: ExpertExchange = "all_to_all"
    """How tokens travel between the ranks of trainer.parallel.expert. deep_ep: by that library's kernels."""


class TrainerSettings(Settings):
    optim: Optimizer = AdamW()
    """The optimizer."""
    schedule: Schedule = Constant()
    """How the learning rate changes over the run."""
    loss: Loss = Dppo()
    """The RL loss."""
    sequence_mask: SequenceMask | None = None
    """Leave whole samples out of the RL loss; `{}` for the default bounds."""
    entropy_coef: float = Field(default=0.0, ge=0)
    """Weight of the entropy bonus on the tokens of the RL loss; 0 for none."""
    max_grad_norm: float = Field(default=1.0, gt=0)
    """Gradients are scaled down to this global norm."""
    activations: ActivationSettings = ActivationSettings()
    """Memory for recomputation."""
    optimizer_on_cpu: bool = False
    """Keep the optimizer's state in CPU memory."""
    parallel: ParallelSettings = ParallelSettings()
    """How ranks divide weights, sequences and experts."""
    experts: ExpertSettings = ExpertSettings()
    """How the load of experts is balanced."""
    head_chunk: int = Field(default=1024, ge=1)
    """Tokens per chunk of the LM head, which never holds more logits than that."""
    compile: bool = False
    """Compile the MLPs, where no activations are recomputed (CUDA)."""
    max_bad_steps: int = Field(default=3, ge=1)
    """Stop after this many steps in a row whose loss or gradients were not finite."""
    probe: bool = True
    """Send logprobs of a few tokens with each version of all weights, for engines to be held to."""
    record_logprobs: int = Field(default=16_384, ge=0)
    """Sampled tokens a step whose logprobs the trainer keeps in the run folder, for people; 0 for none."""
    checkpoints: CheckpointSettings = CheckpointSettings()
    """When the trainer saves what it needs to continue."""
    fake_data: FakeData | None = None
    """Train on random tokens instead of waiting for batches: for benchmarks."""


class TrainSettings(SharedSettings):
    """Settings of `headway train`."""

    trainer: TrainerSettings = TrainerSettings()
    """The trainer."""

    @property
    def data_ranks(self) -> int:
        """Parts of a batch: the ranks that share sequences read the same."""
        return self.placement.trainer_ranks // self.trainer.parallel.context

    @property
    def shard_ranks(self) -> int:
        """Parts of the data that ranks with one copy of the weights read."""
        parallel = self.trainer.parallel
        return self.placement.trainer_ranks // (parallel.replicate * parallel.context)

    @model_validator(mode="after")
    def _dimensions_divide_ranks(self) -> Self:
        ranks, parallel = self.placement.trainer_ranks, self.trainer.parallel
        if ranks % parallel.replicate:
            raise broken_rule(
                "trainer.parallel.replicate",
                f"must divide placement.trainer_ranks, which is {ranks} (got {parallel.replicate})",
            )
        copy = ranks // parallel.replicate
        for name in ("context", "expert"):
            if copy % (size := getattr(parallel, name)):
                raise broken_rule(
                    f"trainer.parallel.{name}",
                    f"must divide placement.trainer_ranks / trainer.parallel.replicate, which is {copy} (got {size})",
                )
        if self.placement.data_ranks not in (None, self.data_ranks):
            raise broken_rule(
                "placement.data_ranks",
                f"must be placement.trainer_ranks / trainer.parallel.context, which is {self.data_ranks} "
                f"(got {self.placement.data_ranks}); leave it out",
            )
        return self

    @model_validator(mode="after")
    def _adapters_have_no_router(self) -> Self:
        if self.model.lora is not None and self.trainer.experts.balance != "off":
            raise broken_rule("trainer.experts.balance", 'must be "off" with model.lora: routers are not trained then')
        return self

    @model_validator(mode="after")
    def _implementation_allows(self) -> Self:
        if self.model.implementation == "headway":
            return self
        trainer = self.trainer
        used = {
            "parallel.context": trainer.parallel.context > 1,
            "parallel.expert": trainer.parallel.expert > 1,
            "experts.balance": trainer.experts.balance != "off",
            "activations.checkpoint": trainer.activations.checkpoint == "selective",
            "compile": trainer.compile,
        }
        for name, wanted in used.items():
            if wanted:
                instead = '; use "full" or "off"' if name == "activations.checkpoint" else ""
                raise broken_rule(
                    f"trainer.{name}",
                    'needs Headway\'s own code of the model, and model.implementation is "transformers"' + instead,
                )
        return self

    @model_validator(mode="after")
    def _schedule_fits(self) -> Self:
        schedule = self.trainer.schedule
        if isinstance(schedule, Linear) and schedule.warmup_steps + schedule.decay_steps > self.max_steps:
            raise broken_rule(
                "trainer.schedule.decay_steps",
                f"and warmup_steps add up to {schedule.warmup_steps + schedule.decay_steps}, more than max_steps, "
                f"which is {self.max_steps}; shorten them or train longer",
            )
        return self

    @model_validator(mode="after")
    def _fake_samples_fit(self) -> Self:
        fake = self.trainer.fake_data
        if fake and fake.mean_len and fake.mean_len > self.seq_len:
            raise broken_rule(
                "trainer.fake_data.mean_len", f"must be at most seq_len, which is {self.seq_len} (got {fake.mean_len})"
            )
        return self
