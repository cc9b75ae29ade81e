"""Dispatch: which episodes start when, and how many run."""
