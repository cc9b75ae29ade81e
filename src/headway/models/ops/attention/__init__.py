"""Attention: of packed samples, over a paged cache, and the cache that it writes."""
