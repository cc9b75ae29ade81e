"""The policy as the trainer runs it: a model and its chunked head, under one module that FSDP can wrap.

The head reads the embedding or head weight inside this module's forward, where FSDP has it gathered, and its
gradient flows back the same way: so tied, untied, sharded and plain weights need no cases.
"""

from contextlib import nullcontext
from typing import NamedTuple

from torch import Tensor, nn

from headway.models.decoder import DecoderLM
from headway.trainer.inputs import Inputs, Scored
from headway.trainer.losses.head import target_logprobs
from headway.trainer.memory.copies import Copies
from headway.trainer.memory.offload import offloaded


class Scores(NamedTuple):
    """Logprobs and entropies of the N tokens that are scored, in float32, the same on all ranks of a context group; for
    MoE models also this rank's tokens per expert, (layers, experts)."""

    logprobs_N: Tensor
    entropy_N: Tensor
    expert_load_LE: Tensor | None


def score_tokens(
    model: DecoderLM, hidden_TD: Tensor, scored: Scored, head_chunk: int, *, entropy_gradient: bool
) -> tuple[Tensor, Tensor]:
    """Compute logprobs and entropies of the M scored tokens from the hidden states of all."""
    return target_logprobs(
        hidden_TD[scored.predictors_M],
        model.head_weight(),
        scored.targets_M,
        scored.temperatures_M,
        head_chunk,
        model.config.logit_softcap,
        entropy_gradient=entropy_gradient,
    )


class Policy(nn.Module):
    def __init__(
        self, model: DecoderLM, head_chunk: int, offload: Copies | None = None, *, entropy_gradient: bool = False
    ) -> None:
        """`offload`: the copies by which saved activations go to CPU memory; None: they stay on the device.

        With `entropy_gradient`, entropies can be part of a loss.
        """
        super().__init__()
        self.model = model
        self.head_chunk = head_chunk
        self.offload = offload
        self.entropy_gradient = entropy_gradient

    def forward(self, inputs: Inputs) -> Scores:
        """`inputs` is one object, so that FSDP's casting of float arguments doesn't reach the temperatures."""
        with nullcontext() if self.offload is None else offloaded(self.offload):
            output = self.model(inputs.tokens)
        logprobs_M, entropy_M = score_tokens(
            self.model, output.hidden_TD, inputs.scored, self.head_chunk, entropy_gradient=self.entropy_gradient
        )
        return Scores(inputs.whole(logprobs_M), inputs.whole(entropy_M), inputs.expert_load(output))
