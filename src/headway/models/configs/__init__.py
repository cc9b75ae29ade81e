"""Configs of models, as config.json tells them, and the sizes that follow. Without torch."""
