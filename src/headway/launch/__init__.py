"""The supervisor of a local run."""
