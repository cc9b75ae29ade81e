"""Recurrences: short convolutions, the gated delta rule and state-space scans, in chunks."""
