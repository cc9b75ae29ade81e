"""The sizes of a block, from which FLOPs and bytes follow."""

from collections.abc import Mapping
from dataclasses import dataclass

from headway.models.configs.cache import LayerCache


@dataclass(frozen=True)
class BlockShape:
    """The sizes of one block, from which FLOPs and bytes follow (`headway.models.costs`).

    `linears` are (inputs, outputs) by the name that adapters target, after a path where two layers share it; `vectors`
    counts the weights of norms and biases; `query_width` is heads x head size; `mlp_width` is how many numbers the MLP
    computes for a token. Every token passes `experts_per_token` of `experts`, each of `expert_weights`;
    `router_weights` choose them, or what to attend to. `expert_sides` adds up the inputs and outputs of one expert's
    matrices, which adapters have beside them.

    Where keys and values of every head are computed from what is cached, `value_width` is heads x size of a value.
    Sparse attention sees at most `most_keys` tokens, after it has scored all by queries of `index_width` numbers.
    A recurrent mixer has `conv_weights` in its convolution; a token meets its state in `state_products` products.
    """

    linears: Mapping[str, tuple[int, int]]
    vectors: int
    query_width: int
    mlp_width: int
    cache: LayerCache
    router_weights: int = 0
    experts: int = 0
    experts_per_token: int = 0
    expert_weights: int = 0
    expert_sides: int = 0
    value_width: int | None = None
    most_keys: int | None = None
    index_width: int = 0
    conv_weights: int = 0
    state_products: int = 0

    @property
    def key_value_width(self) -> int:
        """Numbers of a token's keys and values in training: where nothing projects to them alone (latent attention),
        every query head has its own."""
        if "k_proj" in self.linears and "v_proj" in self.linears:
            return self.linears["k_proj"][1] + self.linears["v_proj"][1]
        return self.query_width + self.attended_width

    @property
    def attended_width(self) -> int:
        """Numbers of attention's output."""
        return self.query_width if self.value_width is None else self.value_width

    @property
    def weights(self) -> int:
        """All parameters."""
        return self._always_used + self.vectors + self.experts * self.expert_weights

    @property
    def active_weights(self) -> int:
        """The weights that multiply one token."""
        return self._always_used + self.experts_per_token * self.expert_weights

    @property
    def _always_used(self) -> int:
        linears = sum(inputs * outputs for inputs, outputs in self.linears.values())
        return linears + self.router_weights + self.conv_weights
