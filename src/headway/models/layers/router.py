"""The router of a mixture: the experts of each token, and their gates."""

from collections.abc import Callable
from typing import Literal

import torch
from torch import Tensor, nn

from headway.models import ops
from headway.models.configs.config import ModelConfig
from headway.models.layers.sent import SentParameters
from headway.models.layers.tape import Tape, taped_linear
from headway.models.ops.experts.choose import Choice, Routing

Regularizer = Callable[[Tensor, Tensor, Tensor], Tensor]
"""Returns gates (T, k) with the gradient of a loss added, of logits (T, experts) and chosen experts (T, k)."""


class ExpertRouter(SentParameters):
    """Scores every expert, picks the k best of a token, and makes their scores its gates.

    `score`: softmax over all experts, or the sigmoid of each (DeepSeek-V3). `bias` adds a parameter to the logits;
    `logit_cap` bounds them softly: cap * tanh(logits / cap). `selection_bias` gives the router a parameter that is
    added to scores to pick experts, and to nothing else: whoever balances the load sets it, no gradient does. Or they
    set `regularizer`.

    The config says the rest: experts may lie in groups, of which only the best serve a token; gates add up to 1 where
    they are normalized (softmax and normalized is a softmax over the chosen alone, as GPT-OSS has it), and are then
    scaled.
    """

    float32_parameters = ("e_score_correction_bias",)
    """Kept and sent in float32 whatever the model's precision: bfloat16 would round away what tells experts apart."""

    def __init__(
        self,
        config: ModelConfig,
        *,
        score: Literal["softmax", "sigmoid"] = "softmax",
        bias: bool = False,
        selection_bias: bool = False,
        logit_cap: float | None = None,
    ) -> None:
        super().__init__()
        self.choice = Choice(
            config.experts_per_token,
            score,
            config.normalize_gates,
            config.gate_scale,
            config.expert_groups,
            config.groups_per_token,
        )
        self.logit_cap = logit_cap
        self.weight = nn.Parameter(torch.empty(config.experts, config.width))
        self.bias = nn.Parameter(torch.empty(config.experts)) if bias else None
        self.e_score_correction_bias = nn.Parameter(torch.empty(config.experts)) if selection_bias else None
        self.regularizer: Regularizer | None = None
        self.tape: Tape | None = None

    def forward(self, x_TD: Tensor, given_Tk: Tensor | None = None) -> Routing:
        """Gates and experts, (T, k). Given choices (-1: choose freely) are gated by the live router's scores."""
        # Sigmoids of many experts lie so close together that their logits, too, are computed in float32.
        logits_TE = self._logits(x_TD.float() if self.choice.score == "sigmoid" else x_TD)
        dtype = x_TD.dtype if self.regularizer is None else torch.float32
        routing = ops.choose_experts(logits_TE, self.e_score_correction_bias, given_Tk, self.choice, dtype)
        if self.regularizer is None:
            return routing
        gates_Tk = self.regularizer(routing.gates_Tk, logits_TE, routing.experts_Tk)
        return routing._replace(gates_Tk=gates_Tk.to(x_TD.dtype))

    def _logits(self, x_TD: Tensor) -> Tensor:
        bias_E = None if self.bias is None else self.sent(self.bias).to(x_TD.dtype)
        logits_TE = taped_linear(x_TD, self.sent(self.weight).to(x_TD.dtype), bias_E, self.tape)
        if self.logit_cap is None:
            return logits_TE
        return self.logit_cap * torch.tanh(logits_TE / self.logit_cap)
