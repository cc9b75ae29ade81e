"""Settings of the algorithms, one class each."""

from collections.abc import Iterable
from typing import Annotated, Literal
from urllib.parse import urlsplit

from pydantic import Field

from headway.config.base import Settings


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


Algorithm = Annotated[
    Grpo | MaxRl | Rloo | ReinforcePp | Rae | HierarchicalGrpo | Opd | Opsd | Sft | Echo,
    Field(discriminator="type"),
]


def is_group_relative(algorithm: Settings) -> bool:
    """Tell whether rewards are compared within a group, which then needs at least two episodes."""
    return isinstance(algorithm, Grpo | MaxRl | Rloo | ReinforcePp | HierarchicalGrpo | Echo)


def _address(url: str) -> tuple[str, int | None]:
    parts = urlsplit(url if "//" in url else f"//{url}")
    host = "127.0.0.1" if parts.hostname == "localhost" else parts.hostname or ""
    return host, parts.port
