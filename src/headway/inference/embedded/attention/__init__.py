"""Attention over the paged cache: plans by which the tokens of a step see what is there."""
