"""Settings of the algorithms, one class each."""

from collections.abc import Iterable
from typing import Annotated, Literal
from urllib.parse import urlsplit

from pydantic import Field

from headway.config.base import Plugin, Settings


class LengthPenalty(Settings):
    """Subtracts group mean reward x (output/max + input/max + turns/max, each with its weight)."""

    output: float = 0.25
    """Weight of the sampled tokens."""
    input: float = 0.1
    """Weight of the tokens read."""
    turns: float = 0.1
    """Weight of the turns."""


class ReferenceSettings(Settings):
    """A frozen model behind HTTP."""

    base_url: str
    """Address of a server that speaks the inference protocol or vLLM's."""
    model: str = "policy"
    """Name of the model on that server."""
    concurrency: int = Field(default=32, ge=1)
    """Requests in flight, at most."""
    retries: int = Field(default=3, ge=0)
    """Times a failed request is tried again."""
    timeout: float = Field(default=300.0, gt=0)
    """Seconds that a request may take."""

    def is_served_by(self, engines: Iterable[str]) -> bool:
        """Tell whether this is the model that the given servers hold, and not a frozen one at another address."""
        return _address(self.base_url) in {_address(engine) for engine in engines}


class Grpo(Settings):
    """Reward minus the mean of its group."""

    type: Literal["grpo"] = "grpo"
    normalize: Literal["none", "std"] = "none"
    """std: divide advantages by the group's standard deviation."""
    length_penalty: LengthPenalty | None = None
    """Make long episodes worth less."""


class MaxRl(Settings):
    """Reward minus the group's mean, divided by that mean."""

    type: Literal["max_rl"] = "max_rl"
    length_penalty: LengthPenalty | None = None
    """Make long episodes worth less."""


class Rloo(Settings):
    """Reward minus the mean of the others in its group."""

    type: Literal["rloo"] = "rloo"
    length_penalty: LengthPenalty | None = None
    """Make long episodes worth less."""


class ReinforcePp(Settings):
    """Reward minus the mean of its group, normalized over the batch."""

    type: Literal["reinforce_pp"] = "reinforce_pp"


class Rae(Settings):
    """Reward minus a moving average of the agent's own rewards: for self-play."""

    type: Literal["rae"] = "rae"
    decay: float = Field(default=0.95, ge=0, lt=1)
    """Weight of the past in each agent's moving average."""


class HierarchicalGrpo(Settings):
    """Proposer and solver: solvers compete on one proposed problem, proposers with each other."""

    type: Literal["hierarchical_grpo"] = "hierarchical_grpo"
    normalize: Literal["none", "std"] = "none"
    """std: divide advantages by the group's standard deviation."""


class Opd(Settings):
    """On-policy distillation from a frozen teacher."""

    type: Literal["opd"] = "opd"
    teacher: ReferenceSettings | None = None
    """The frozen model whose logprobs are the target."""


class Opsd(Settings):
    """Self-distillation: the policy, shown a demonstration, teaches itself."""

    type: Literal["opsd"] = "opsd"
    demonstration: str = "demonstration"
    """Key of the task's data that holds the demonstration."""


class Sft(Settings):
    """Cross-entropy on tokens that a frozen model samples."""

    type: Literal["sft"] = "sft"
    teacher: ReferenceSettings | None = None
    """The frozen model that samples."""


class Echo(Settings):
    """GRPO plus cross-entropy on what the environment said."""

    type: Literal["echo"] = "echo"
    roles: dict[str, float] = {"tool": 0.1}
    """Weight of the cross-entropy on observation tokens, by message role."""
    normalize: Literal["none", "std"] = "none"
    """std: divide advantages by the group's standard deviation."""


class CustomAdvantage(Plugin):
    """A function of your own: the rewards of a group to its advantages."""

    type: Literal["advantage"] = "advantage"
    length_penalty: LengthPenalty | None = None
    """Make long episodes worth less."""


class CustomAlgorithm(Plugin):
    """An algorithm of your own: a subclass of `headway.algorithms.base.Algorithm`."""

    type: Literal["custom"] = "custom"


class KlPenalty(Settings):
    """Keeps the policy near a frozen model, by the KL divergence of the tokens it sampled."""

    coefficient: float = Field(default=1e-3, gt=0)
    """Weight of the divergence, beside a loss whose advantages are about 1."""
    reference: ReferenceSettings
    """The frozen model, usually the one that the run starts from, served elsewhere."""


Algorithm = Annotated[
    Grpo
    | MaxRl
    | Rloo
    | ReinforcePp
    | Rae
    | HierarchicalGrpo
    | Opd
    | Opsd
    | Sft
    | Echo
    | CustomAdvantage
    | CustomAlgorithm,
    Field(discriminator="type"),
]


def is_group_relative(algorithm: Settings) -> bool:
    """Tell whether rewards are compared within a group, which then needs at least two episodes.

    An algorithm of one's own says so by itself, when it is made.
    """
    return isinstance(algorithm, Grpo | MaxRl | Rloo | ReinforcePp | HierarchicalGrpo | Echo | CustomAdvantage)


def _address(url: str) -> tuple[str, int | None]:
    parts = urlsplit(url if "//" in url else f"//{url}")
    host = "127.0.0.1" if parts.hostname == "localhost" else parts.hostname or ""
    return host, parts.port
