"""LoRA adapters: the bank of slots, and PEFT's names and folders."""
