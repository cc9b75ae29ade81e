"""Parallel training: named dimensions, ranks, context and expert parallelism, sharded tensors."""
