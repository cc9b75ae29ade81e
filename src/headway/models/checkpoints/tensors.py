"""Weights as a stream of tensors under Hugging Face's names, out of a model and into one."""

import logging
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor, nn

from headway.base.errors import HeadwayError
from headway.models.checkpoint_tensors import CheckpointTensor
from headway.models.decoder import DecoderLM
from headway.models.registry import find_family
from headway.models.sharded import fill_part, gathered, is_sharded

logger = logging.getLogger(__name__)

_NAMED_AT_MOST = 8


def base_parameters(model: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
    """Iterate over the model's own parameters, without adapters."""
    return ((name, parameter) for name, parameter in model.named_parameters() if ".lora_" not in name)


def hf_layout(model: DecoderLM) -> list[tuple[str, torch.Size]]:
    """List names and shapes of `hf_tensors`, in its order, without touching a weight."""
    layout = []
    for name, parameter in base_parameters(model):
        whole = torch.empty(parameter.shape, device="meta")
        layout += [(tensor.name, part_of(whole, tensor).shape) for tensor in checkpoint_tensors(model, name)]
    return layout


def hf_tensors(model: DecoderLM) -> Iterator[tuple[str, Tensor]]:
    """Iterate over the checkpoint's tensors, one parameter at a time; tied heads are left out.

    A sharded parameter is gathered: then all ranks must iterate alike.
    """
    for name, parameter in base_parameters(model):
        whole = gathered(parameter)
        for tensor in checkpoint_tensors(model, name):
            yield tensor.name, part_of(whole, tensor)


def float32_tensors(model: DecoderLM) -> set[str]:
    """Names of the checkpoint's tensors that stay in float32, whatever precision the others have."""
    own = [
        f"{path}.{name}" for path, module in model.named_modules() for name in getattr(module, "float32_parameters", ())
    ]
    present = dict(base_parameters(model))
    return {tensor.name for name in own if name in present for tensor in checkpoint_tensors(model, name)}


def part_of(whole: Tensor, tensor: CheckpointTensor) -> Tensor:
    """View the part of a parameter that a checkpoint's tensor holds, as it lies there."""
    part = whole[tensor.at] if tensor.at else whole
    return part.transpose(-2, -1) if tensor.transposed else part


@dataclass(frozen=True, slots=True)
class Target:
    """The destination of a checkpoint's `tensor`: `view` is its memory in `parameter`, until the parameter is moved.
    For a `sharded` parameter the view has the shape only."""

    parameter: nn.Parameter
    tensor: CheckpointTensor
    view: Tensor
    sharded: bool


def hf_targets(model: DecoderLM) -> dict[str, Target]:
    """Map the names of the checkpoint's tensors to their destinations."""
    targets = {}
    for name, parameter in base_parameters(model):
        sharded = is_sharded(parameter)
        whole = torch.empty(parameter.shape, device="meta") if sharded else parameter.data
        for tensor in checkpoint_tensors(model, name):
            targets[tensor.name] = Target(parameter, tensor, part_of(whole, tensor), sharded)
    return targets


def load_hf_tensors(
    model: DecoderLM, tensors: Iterable[tuple[str, Tensor]], targets: Mapping[str, Target] | None = None
) -> None:
    """Copy a checkpoint's tensors, in any order, into the model's parameters; one that shares their memory stays.

    A rank touches only what it holds of sharded parameters: tensors that are mapped from files are not read otherwise.
    `targets` are the model's own, where the caller has them. Raises HeadwayError that names missing, extra and
    misshapen tensors; the model then holds a mix of old and new.
    """
    missing = dict(hf_targets(model) if targets is None else targets)
    problems = _Problems()
    family, skipped = find_family(model.config.family), list[str]()
    with torch.no_grad():
        for name, tensor in _as_written(model, tensors, missing.keys()):
            target = missing.pop(name, None)
            if target is None:
                if family.skips_tensor(name, model.config):
                    skipped.append(name)
                elif not _ignorable(name, model):
                    problems.extra.append(name)
            elif tensor.shape != (view := target.view).shape:
                problems.misshapen.append(f"{name} {tuple(tensor.shape)}, expected {tuple(view.shape)}")
            elif target.sharded:
                fill_part(target.parameter, target.tensor.at, part_of(tensor, replace(target.tensor, at=())))
            elif view.data_ptr() != tensor.data_ptr():
                view.copy_(tensor)
    problems.missing += missing
    problems.raise_any()
    if skipped:
        logger.warning(
            "left out %d tensors of parts that are not computed here, which checkpoints that Headway writes do not "
            "have: %s",
            len(skipped),
            _some(skipped),
        )


def _as_written(
    model: DecoderLM, tensors: Iterable[tuple[str, Tensor]], expected: Collection[str]
) -> Iterator[tuple[str, Tensor]]:
    """Cut parameters that came whole, under the model's own names, into the tensors that checkpoints have of them."""
    own: dict[str, nn.Parameter] | None = None
    family = find_family(model.config.family)
    for name, tensor in tensors:
        if name in expected:
            yield name, family.as_written(name, tensor, model.config)
            continue
        own = dict(base_parameters(model)) if own is None else own
        ours = family.own_name(name, model.config)
        if ours in own and tensor.shape == own[ours].shape:
            yield from ((part.name, part_of(tensor, part)) for part in checkpoint_tensors(model, ours))
        else:
            yield name, tensor


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
