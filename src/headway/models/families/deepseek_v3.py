"""DeepSeek-V3 and R1, and models of their shape (Kimi-K2, Moonlight): latent attention and many small experts."""

from headway.models.families.latent import LatentFamily


class DeepseekV3(LatentFamily):
    model_type = "deepseek_v3"
    aliases = ("kimi_k2",)
    architecture = "DeepseekV3ForCausalLM"
    examples = "DeepSeek-V3, R1, Kimi-K2, Moonlight"
    notes = "latent attention (MLA), whose cache holds compressed rows alone; MTP layers are left out"
    hf_names = LatentFamily.hf_names | {"rope_interleave": "rope_interleave"}
    chat_format = "deepseek-v3"
