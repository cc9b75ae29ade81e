"""Parallel training: ranks, FSDP2, sharded tensors."""
