"""Keeps episodes in flight, bounds staleness, forms and packs batches, tells the fleet about weights."""
