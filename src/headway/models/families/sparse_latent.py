"""The base of families with sparse latent attention (DSA): what config.json says of indexers. Imports no torch."""

from typing import Any

from headway.base.errors import UsageError
from headway.models.configs.config import ModelConfig
from headway.models.configs.latent import LatentConfig
from headway.models.families.latent import LatentFamily

_KINDS = {"full": True, "shared": False, "F": True, "S": False}


class SparseLatentFamily(LatentFamily):
    hf_names = LatentFamily.hf_names | {
        "index_heads": "index_n_heads",
        "index_dim": "index_head_dim",
        "index_count": "index_topk",
    }
    hf_reads = (
        *LatentFamily.hf_reads,
        *("mlp_layer_types", "layer_types", "indexer_types"),
        *("index_topk_pattern", "index_topk_freq", "index_skip_topk_offset"),
    )
    hf_fixed = {
        **LatentFamily.hf_fixed,
        "mlp_bias": False,
        "rope_interleave": True,
        "indexer_rope_interleave": True,  # neighbours of an index head are rotated together; otherwise its halves
    }
    shares_indexers = True
    """Layers may share the choice of an earlier one."""

    def check_hf(self, hf: dict[str, Any]) -> None:
        super().check_hf(hf)
        if set(hf.get("layer_types") or ()) - {"indexed_attention"}:
            raise UsageError("layer_types other than indexed_attention are not supported")

    def fields_from_hf(self, hf: dict[str, Any]) -> dict[str, Any]:
        for name in ("q_lora_rank", "index_n_heads", "index_head_dim", "index_topk"):
            if hf.get(name) is None:
                raise KeyError(name)
        own = {"index_rope_interleave": self.hf_fixed["indexer_rope_interleave"], "indexers": self._indexers(hf)}
        return super().fields_from_hf(hf) | own

    def dense_layers(self, hf: dict[str, Any]) -> tuple[int, ...]:
        kinds = hf.get("mlp_layer_types")
        if kinds is None:
            return super().dense_layers(hf)
        return tuple(layer for layer, kind in enumerate(kinds) if kind == "dense")

    def fields_to_hf(self, config: ModelConfig) -> dict[str, Any]:
        assert isinstance(config, LatentConfig)
        fields = super().fields_to_hf(config)
        fields["mlp_layer_types"] = ["sparse" if config.sparse(n) else "dense" for n in range(config.layers)]
        if self.shares_indexers:
            fields["indexer_types"] = ["full" if own else "shared" for own in config.indexers]
        return fields

    def _indexers(self, hf: dict[str, Any]) -> tuple[bool, ...]:
        """Tell of each layer whether it has an indexer: by a list, a pattern of letters, or every so many layers."""
        layers: int = hf["num_hidden_layers"]
        if not self.shares_indexers:
            return (True,) * layers
        kinds = hf.get("indexer_types") or hf.get("index_topk_pattern")
        if kinds is None:
            every: int = max(hf.get("index_topk_freq") or 1, 1)
            offset: int = hf.get("index_skip_topk_offset", 2)
            return tuple(max(layer - offset + 1, 0) % every == 0 for layer in range(layers))
        if unknown := [kind for kind in kinds if kind not in _KINDS]:
            raise UsageError(f"indexer_types {unknown[0]!r} is not supported (known: full, shared)")
        return tuple(_KINDS[kind] for kind in kinds)
