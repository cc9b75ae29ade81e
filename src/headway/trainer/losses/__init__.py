"""Losses: the components, the RL losses by family, the LM head."""
