"""Sandboxes: a small protocol, its back ends, a pool of them, and the sweep that cleans up after killed processes."""
