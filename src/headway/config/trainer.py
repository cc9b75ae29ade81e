"""Settings of the trainer."""

from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from headway.config.base import Plugin, Settings, broken_rule
from headway.config.shared import SharedSettings


class AdamW(Settings):
    type: Literal["adamw"] = "adamw"
    lr: float = Field(default=1e-6, gt=0)
    """Learning rate."""
    betas: tuple[float, float] = (0.9, 0.95)
    """Decay of the two moments."""
    eps: float = 1e-8
    """Added to the denominator."""
    weight_decay: float = Field(default=0.0, ge=0)
    """Decoupled weight decay."""


class Muon(Settings):
    type: Literal["muon"] = "muon"
    lr: float = Field(default=1e-4, gt=0)
    """Learning rate of matrices, whose updates are orthogonalized."""
    momentum: float = Field(default=0.95, ge=0, lt=1)
    """Momentum of matrices."""
    adamw_lr: float = Field(default=1e-6, gt=0)
    """Learning rate of everything else (embeddings, norms, head), which AdamW updates."""
    weight_decay: float = Field(default=0.0, ge=0)
    """Decoupled weight decay."""


class Sgd(Settings):
    type: Literal["sgd"] = "sgd"
    lr: float = Field(default=1e-3, gt=0)
    """Learning rate."""
    momentum: float = Field(default=0.0, ge=0, lt=1)
    """Momentum; 0 is plain gradient descent."""
    weight_decay: float = Field(default=0.0, ge=0)
    """Weight decay."""


class SignSgd(Settings):
    type: Literal["signsgd"] = "signsgd"
    lr: float = Field(default=1e-6, gt=0)
    """Learning rate: every weight moves by this much."""
    weight_decay: float = Field(default=0.0, ge=0)
    """Decoupled weight decay."""


class CustomOptimizer(Plugin):
    """An update rule of your own: a subclass of `headway.trainer.optimizers.rules.ElementwiseRule`, or any `Rule`."""

    type: Literal["custom"] = "custom"
    lr: float = Field(default=1e-6, gt=0)
    """Learning rate; the class gets it as the argument `lr`."""


Optimizer = Annotated[AdamW | Muon | Sgd | SignSgd | CustomOptimizer, Field(discriminator="type")]


class Constant(Settings):
    type: Literal["constant"] = "constant"
    warmup_steps: int = Field(default=0, ge=0)
    """Steps over which the rate rises from 0."""


class Linear(Settings):
    """Warm-up, stable, decay."""

    type: Literal["linear"] = "linear"
    warmup_steps: int = Field(default=0, ge=0)
    """Steps over which the rate rises from 0."""
    decay_steps: int = Field(default=0, ge=0)
    """Steps at the end over which the rate falls to `min_ratio`."""
    min_ratio: float = Field(default=0.0, ge=0, le=1)
    """Share of the rate that is left at the end."""


class Cosine(Settings):
    type: Literal["cosine"] = "cosine"
    warmup_steps: int = Field(default=0, ge=0)
    """Steps over which the rate rises from 0."""
    min_ratio: float = Field(default=0.1, ge=0, le=1)
    """Share of the rate that is left at the end."""


class CustomSchedule(Plugin):
    """A function of your own: (step, max_steps) to a factor of the learning rate."""

    type: Literal["custom"] = "custom"
    warmup_steps: int = Field(default=0, ge=0)
    """Steps over which the rate rises from 0, before the function is asked."""


Schedule = Annotated[Constant | Linear | Cosine | CustomSchedule, Field(discriminator="type")]


class Dppo(Settings):
    """Drops tokens whose probability moved too far in the direction of their advantage."""

    type: Literal["dppo"] = "dppo"
    threshold: float = 0.2
    """Drop a token whose probability moved further than this in the direction of its advantage."""
    kl_coef: float = 1e-3
    """Weight of the squared log-ratio."""
    cap: float | None = Field(default=None, ge=1)
    """Largest importance ratio. Default: none, which suits ratios that are what was learned; 1.3 suits ratios that are
    mostly noise, as of older tokens in FP8."""


class Ipo(Settings):
    """Drops tokens whose probability moved too far in either direction."""

    type: Literal["ipo"] = "ipo"
    threshold: float = 0.1
    """Drop a token whose probability moved further than this."""
    kl_coef: float = 1e-3
    """Weight of the squared log-ratio."""


class Aipo(Settings):
    """Importance-weighted policy gradient with a cap on the ratio."""

    type: Literal["aipo"] = "aipo"
    delta: float = 4.0
    """Largest importance ratio."""


class PpoClip(Settings):
    """PPO's clipped objective."""

    type: Literal["ppo_clip"] = "ppo_clip"
    eps_low: float = 0.2
    """The ratio is clipped to at least 1 - eps_low."""
    eps_high: float = 0.28
    """The ratio is clipped to at most 1 + eps_high."""
    delta: float | None = None
    """Largest ratio also where the advantage is negative (two-sided clipping, https://arxiv.org/abs/2505.07291, which
    takes 4). Default: no bound there, as in PPO."""

    @model_validator(mode="after")
    def _outer_bound(self) -> Self:
        if self.delta is not None and self.delta <= 1 + self.eps_high:
            raise broken_rule("delta", f"must be above 1 + eps_high, which is {1 + self.eps_high:g} (got {self.delta})")
        return self


class Cispo(Settings):
    """Policy gradient weighted by a clipped ratio."""

    type: Literal["cispo"] = "cispo"
    eps_low: float = 0.2
    """The weight is clipped to at least 1 - eps_low."""
    eps_high: float = 0.28
    """The weight is clipped to at most 1 + eps_high."""


class Gspo(Settings):
    """PPO's objective with one ratio for the whole sequence."""

    type: Literal["gspo"] = "gspo"
    eps_low: float = 3e-4
    """The sequence's ratio is clipped to at least 1 - eps_low."""
    eps_high: float = 4e-4
    """The sequence's ratio is clipped to at most 1 + eps_high."""


class Tis(Settings):
    """Truncated importance sampling."""

    type: Literal["tis"] = "tis"
    cap: float = 2.0
    """Largest importance weight."""


class Icepop(Settings):
    """Importance sampling that drops tokens outside a window."""

    type: Literal["icepop"] = "icepop"
    low: float = 0.5
    """Tokens whose ratio is below this are dropped."""
    high: float = 5.0
    """Tokens whose ratio is above this are dropped."""

    @model_validator(mode="after")
    def _ordered(self) -> Self:
        if self.low > self.high:
            raise broken_rule("low", f"must be at most high, which is {self.high} (got {self.low})")
        return self


class CustomLoss(Plugin):
    """A function of your own."""

    type: Literal["custom"] = "custom"


Loss = Annotated[Dppo | Ipo | Aipo | PpoClip | Cispo | Gspo | Tis | Icepop | CustomLoss, Field(discriminator="type")]


class SequenceMask(Settings):
    """Leaves samples out of the RL loss whose tokens have become too likely or too unlikely since they were sampled."""

    mean_low: float = Field(default=0.1, ge=0)
    """Smallest geometric mean of a sample's importance ratios."""
    mean_high: float = Field(default=10.0, gt=0)
    """Largest geometric mean of a sample's importance ratios."""
    token_low: float = Field(default=0.0, ge=0)
    """Smallest ratio that any token of a sample may have."""
    token_high: float = Field(default=100.0, gt=0)
    """Largest ratio that any token of a sample may have."""

    @model_validator(mode="after")
    def _ordered(self) -> Self:
        for low, high in (("mean_low", "mean_high"), ("token_low", "token_high")):
            if getattr(self, low) > getattr(self, high):
                raise broken_rule(low, f"must be at most {high}, which is {getattr(self, high)}")
        return self


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
