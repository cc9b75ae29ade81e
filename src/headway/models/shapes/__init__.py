"""Shapes of models and their parts, as config.json tells them. Without torch."""
