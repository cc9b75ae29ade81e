"""GLM-5: latent attention over the tokens that an indexer chooses, whose choice following layers may share."""

from headway.models.families.sparse_latent import SparseLatentFamily


class GlmMoeDsa(SparseLatentFamily):
    model_type = "glm_moe_dsa"
    architecture = "GlmMoeDsaForCausalLM"
    examples = "GLM-5"
    notes = "latent and [sparse attention](#sparse-attention), whose choice layers may share"
    chat_format = "glm-5"
