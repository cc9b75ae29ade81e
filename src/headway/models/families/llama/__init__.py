"""Llama, and models of its architecture (SmolLM2, TinyLlama, …)."""
