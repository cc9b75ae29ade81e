"""LoRA adapters: added to a model, kept beside it or merged into it, under PEFT's names and in its folders."""
