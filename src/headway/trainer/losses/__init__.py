"""Losses: components, policy-gradient losses, the LM head."""
