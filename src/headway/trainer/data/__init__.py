"""Supervised data: rows of files become conversations, tokens, an order, and packed micro-batches."""
