"""DeepSeek-V3.2: DeepSeek-V3 whose every layer attends to the tokens that its indexer chooses."""

from headway.models.families.sparse_latent import SparseLatentFamily


class DeepseekV32(SparseLatentFamily):
    model_type = "deepseek_v32"
    architecture = "DeepseekV32ForCausalLM"
    examples = "DeepSeek-V3.2"
    notes = "DeepSeek-V3 with [sparse attention](#sparse-attention)"
    hf_fixed = {**SparseLatentFamily.hf_fixed, "indexer_rope_interleave": False}
    shares_indexers = False
