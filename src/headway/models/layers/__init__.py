"""The layers that model families share."""
