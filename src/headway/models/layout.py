"""How a parameter is spread over the tensors of a checkpoint."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Part:
    """The tensor called `name` in the checkpoint is `parameter[at]` here."""

    name: str
    at: tuple[int | slice, ...] = ()
