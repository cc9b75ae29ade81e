"""Parallel training: named dimensions, ranks, FSDP2, sharded tensors."""
