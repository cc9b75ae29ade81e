"""Hugging Face's own modules behind Headway's interface of a model: packed tokens in, hidden states out."""
