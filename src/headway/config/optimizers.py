"""Settings of optimizers, and how their learning rate goes over a run."""

from typing import Annotated, Literal

from pydantic import Field

from headway.config.base import Plugin, Settings


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
