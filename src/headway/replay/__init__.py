"""Replay of a run from its journal and recorded episodes: the same decisions, batches and weights, or changed ones."""
