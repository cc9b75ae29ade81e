"""Settings of the RL losses, and of the mask that goes with any of them."""

from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from headway.config.base import Plugin, Settings, broken_rule


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
