"""Checkpoints: folders as Hugging Face lays them out, weights under its names, GGUF files."""
