"""The fleet: engines, membership, weight updates."""
