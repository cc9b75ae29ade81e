"""The loss functions by `trainer.loss.type`. Their numbers come from the settings, which hold the defaults."""

import inspect
import reprlib
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from torch import Tensor

from headway.base.errors import PermanentError, UsageError
from headway.base.imports import load_object
from headway.config.losses import CustomLoss, Loss, SequenceMask
from headway.trainer.losses.base import LossFunction, LossInputs, PerToken
from headway.trainer.losses.policy import aipo, cispo, dppo, gspo, icepop, ipo, ppo_clip, tis
from headway.trainer.losses.sequence_mask import masking_samples

LOSSES: dict[str, Callable[..., tuple[Tensor, PerToken]]] = {
    loss.__name__: loss for loss in (dppo, ipo, aipo, ppo_clip, cispo, gspo, tis, icepop)
}


def make_loss(settings: Loss, mask: SequenceMask | None = None) -> LossFunction:
    """Bind the settings' numbers to the function that they name, without the samples that `mask` leaves out."""
    if isinstance(settings, CustomLoss):
        loss = _custom_loss(settings.path, settings.args)
    else:
        loss = partial(LOSSES[settings.type], **settings.model_dump(exclude={"type"}))
    return loss if mask is None else masking_samples(loss, mask)


def _custom_loss(path: str, args: dict[str, Any]) -> LossFunction:
    function = load_object(path, "trainer.loss.path", "headway.losses")
    try:
        inspect.signature(function).bind(None, **args)
    except TypeError as error:
        raise UsageError(
            f'trainer.loss.path "{path}" must be callable as loss(inputs, **trainer.loss.args), where inputs is a '
            "headway.trainer.losses.base.LossInputs (logprobs_T, old_logprobs_T, advantages_T, weights_T, "
            f"segments_T); its signature is {inspect.signature(function)}: {error}"
        ) from error

    def checked(inputs: LossInputs) -> tuple[Tensor, PerToken]:
        returned = function(inputs, **args)
        match returned:
            case (Tensor() as loss_T, Mapping() as metrics) if loss_T.shape == inputs.logprobs_T.shape:
                return loss_T, metrics
        raise PermanentError(
            f'trainer.loss.path "{path}" returned {_describe(returned)}; it must return the loss of each of the '
            f"{len(inputs.logprobs_T)} tokens, as a tensor like inputs.logprobs_T, and a dict of metrics"
        )

    return checked


def _describe(returned: object) -> str:
    if isinstance(returned, Tensor):
        return f"a tensor of shape {tuple(returned.shape)}"
    if isinstance(returned, tuple):
        return f"({', '.join(map(_describe, returned))})"
    return reprlib.repr(returned)
