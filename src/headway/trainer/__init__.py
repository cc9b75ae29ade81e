"""Consumes packed batches, steps the optimizer, publishes weights. Knows nothing of algorithms."""
