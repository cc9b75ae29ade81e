"""Checkpoints: written, checked, copied elsewhere, and found again."""
