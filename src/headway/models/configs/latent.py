"""The shape of a decoder with latent attention (MLA), optionally sparse. Imports no torch."""

from dataclasses import dataclass

from headway.base.errors import UsageError
from headway.models.configs.config import ModelConfig


@dataclass(frozen=True)
class LatentConfig(ModelConfig):
    """`kv_rank` numbers of a token hold its keys and values; `q_rank` its queries, None: these are not compressed. Of
    a key's `head_dim` numbers the last `rope_dim` have positions; `rope_interleave`: neighbours are rotated together.

    Where attention is sparse, `indexers` says for each layer whether it chooses `index_count` tokens by an indexer of
    its own, or shares the choice of the layer before that has one.
    """

    normalize_gates: bool = True
    gate_scale: float = 2.5
    q_rank: int | None = None
    kv_rank: int = 512
    nope_dim: int = 128
    rope_dim: int = 64
    v_dim: int = 128
    rope_interleave: bool = True
    index_heads: int = 0
    index_dim: int = 0
    index_count: int = 0
    index_rope_interleave: bool = True
    indexers: tuple[bool, ...] = ()

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.kv_heads != self.heads:
            raise UsageError(f"latent attention has as many key heads as heads (got {self.kv_heads}, {self.heads})")
        if self.indexers and (len(self.indexers) != self.layers or not self.indexers[0]):
            raise UsageError(f"indexers are needed for {self.layers} layers, of which the first has its own")
        if self.indexers and (self.q_rank is None or self.index_dim < self.rope_dim):
            raise UsageError("an indexer needs q_lora_rank, and index_head_dim of at least qk_rope_head_dim")

    @property
    def sharpness(self) -> float:
        """The factor of scores besides 1 / √head size: YaRN's mscale, squared."""
        scaling = self.rope_scaling
        if scaling is None or not scaling.mscale_all_dim:
            return 1.0
        return scaling.magnitude(scaling.mscale_all_dim) ** 2

    def chosen_by(self, layer: int) -> int | None:
        """The layer whose indexer chooses what `layer` attends to; None: it attends to all."""
        if not self.indexers:
            return None
        return max(n for n in range(layer + 1) if self.indexers[n])
