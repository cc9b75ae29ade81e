"""How a parameter is called here, and how it is spread over the tensors of a checkpoint."""

from dataclasses import dataclass

_WRAPPERS = ("_checkpoint_wrapped_module.", "_orig_mod.")


@dataclass(frozen=True, slots=True)
class Part:
    """The tensor called `name` in the checkpoint is `parameter[at]` here."""

    name: str
    at: tuple[int | slice, ...] = ()


def plain_name(name: str) -> str:
    """A module's or parameter's name without the wrappers of activation checkpointing and compilation."""
    for wrapper in _WRAPPERS:
        name = name.replace(wrapper, "")
    return name
