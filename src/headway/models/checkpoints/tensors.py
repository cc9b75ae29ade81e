"""Weights as a stream of tensors under Hugging Face's names, out of a model and into one."""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from headway.core.errors import HeadwayError
from headway.models.decoder import DecoderLM
from headway.models.family import CheckpointTensor
from headway.models.registry import find_family
from headway.models.sharded import fill_sharded, gathered, is_sharded

_NAMED_AT_MOST = 8


def base_parameters(model: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
    """Iterate over the model's own parameters, without adapters."""
    return ((name, parameter) for name, parameter in model.named_parameters() if ".lora_" not in name)


def hf_layout(model: DecoderLM) -> list[tuple[str, torch.Size]]:
    """List names and shapes of `hf_tensors`, in its order, without touching a weight."""
    layout = []
    for name, parameter in base_parameters(model):
        whole = torch.empty(parameter.shape, device="meta")
        layout += [(tensor.name, whole[tensor.at].shape) for tensor in checkpoint_tensors(model, name)]
    return layout


def hf_tensors(model: DecoderLM) -> Iterator[tuple[str, Tensor]]:
    """Iterate over the checkpoint's tensors, one parameter at a time; tied heads are left out.

    A sharded parameter is gathered: then all ranks must iterate alike.
    """
    for name, parameter in base_parameters(model):
        whole = gathered(parameter)
        for tensor in checkpoint_tensors(model, name):
            yield tensor.name, whole[tensor.at] if tensor.at else whole


@dataclass(frozen=True, slots=True)
class Target:
    """The destination of a checkpoint's tensor: `view` is its memory in `parameter`, until the parameter is moved.
    For a `sharded` parameter the view has the shape only."""

    parameter: nn.Parameter
    at: tuple[int | slice, ...]
    view: Tensor
    sharded: bool


def hf_targets(model: DecoderLM) -> dict[str, Target]:
    """Map the names of the checkpoint's tensors to their destinations."""
    targets = {}
    for name, parameter in base_parameters(model):
        sharded = is_sharded(parameter)
        whole = torch.empty(parameter.shape, device="meta") if sharded else parameter.data
        for tensor in checkpoint_tensors(model, name):
            view = whole[tensor.at] if tensor.at else whole
            targets[tensor.name] = Target(parameter, tensor.at, view, sharded)
    return targets


def load_hf_tensors(
    model: DecoderLM, tensors: Iterable[tuple[str, Tensor]], targets: Mapping[str, Target] | None = None
) -> None:
    """Copy a checkpoint's tensors, in any order, into the model's parameters; one that shares their memory stays.

    `targets` are the model's own, where the caller has them. Raises HeadwayError that names missing, extra and
    misshapen tensors; the model then holds a mix of old and new.
    """
    missing = dict(hf_targets(model) if targets is None else targets)
    problems = _Problems()
    staged = _ShardedParameters()
    with torch.no_grad():
        for name, tensor in tensors:
            target = missing.pop(name, None)
            if target is None:
                if not _ignorable(name, model):
                    problems.extra.append(name)
            elif tensor.shape != (view := target.view).shape:
                problems.misshapen.append(f"{name} {tuple(tensor.shape)}, expected {tuple(view.shape)}")
            elif target.sharded:
                staged.add(target, tensor)
            elif view.data_ptr() != tensor.data_ptr():
                view.copy_(tensor)
    problems.missing += missing
    problems.raise_any()


@dataclass(slots=True)
class _ShardedParameters:
    """Sharded parameters, assembled on the CPU until whole; then each rank keeps its own share."""

    wholes: dict[int, Tensor] = field(default_factory=dict)
    filled: dict[int, int] = field(default_factory=dict)

    def add(self, target: Target, tensor: Tensor) -> None:
        parameter = target.parameter
        key = id(parameter)
        if key not in self.wholes:
            self.wholes[key] = torch.empty(parameter.shape, dtype=parameter.dtype)
        whole = self.wholes[key]
        whole[target.at].copy_(tensor)
        self.filled[key] = self.filled.get(key, 0) + tensor.numel()
        if self.filled[key] == whole.numel():
            fill_sharded(parameter, whole)
            del self.wholes[key]


@dataclass(slots=True)
class _Problems:
    missing: list[str] = field(default_factory=list)
    extra: list[str] = field(default_factory=list)
    misshapen: list[str] = field(default_factory=list)

    def raise_any(self) -> None:
        found = [
            f"{len(names)} {kind}: {_some(names)}"
            for kind, names in (("missing", self.missing), ("extra", self.extra), ("misshapen", self.misshapen))
            if names
        ]
        if found:
            raise HeadwayError(f"the tensors do not fit the model ({'; '.join(found)})")


def _some(names: list[str]) -> str:
    more = len(names) - _NAMED_AT_MOST
    return ", ".join(names[:_NAMED_AT_MOST]) + (f" and {more} more" if more > 0 else "")


def _ignorable(name: str, model: DecoderLM) -> bool:
    """Allow what some checkpoints repeat: a tied head, and rotary frequencies, which are computed here."""
    return (name == "lm_head.weight" and model.config.tied) or name.endswith(".rotary_emb.inv_freq")


def checkpoint_tensors(model: DecoderLM, parameter: str) -> list[CheckpointTensor]:
    """The tensors of the checkpoint that a parameter of the model is made of."""
    return find_family(model.config.family).checkpoint_tensors(parameter, model.config)
