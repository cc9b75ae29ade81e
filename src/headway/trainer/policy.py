"""The policy as the trainer runs it: a model and its chunked head, under one module that FSDP can wrap.

The head reads the embedding or head weight inside this module's forward, where FSDP has it gathered, and its
gradient flows back the same way: so tied, untied, sharded and plain weights need no cases.
"""

from contextlib import nullcontext
from typing import NamedTuple

from torch import Tensor, nn

from headway.models.decoder import DecoderLM
from headway.trainer.inputs import Inputs
from headway.trainer.losses.head import target_logprobs
from headway.trainer.memory.offload import offloaded


class Scores(NamedTuple):
    """Logprobs and entropies of the N tokens that are scored, in float32; for MoE models also the tokens per expert,
    (layers, experts)."""

    logprobs_N: Tensor
    entropy_N: Tensor
    expert_load_LE: Tensor | None


class Policy(nn.Module):
    def __init__(self, model: DecoderLM, head_chunk: int, offload: bool = False) -> None:
        super().__init__()
        self.model = model
        self.head_chunk = head_chunk
        self.offload = offload

    def forward(self, inputs: Inputs) -> Scores:
        """`inputs` is one object, so that FSDP's casting of float arguments doesn't reach the temperatures."""
        with offloaded() if self.offload else nullcontext():
            output = self.model(inputs.tokens)
        scored = inputs.scored
        logprobs_N, entropy_N = target_logprobs(
            output.hidden_TD[scored.rows_N - 1],
            self.model.head_weight(),
            scored.targets_N,
            scored.temperatures_N,
            self.head_chunk,
        )
        return Scores(logprobs_N, entropy_N, output.expert_load_LE)
