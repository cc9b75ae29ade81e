"""Typed settings, one file per process, and the loader that layers TOML files and flags."""
