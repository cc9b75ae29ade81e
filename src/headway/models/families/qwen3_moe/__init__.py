"""Qwen3 with mixtures of experts."""
