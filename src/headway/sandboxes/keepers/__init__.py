"""Keepers: the first process of a sandbox, and our side of the two protocols that one is spoken to with."""
