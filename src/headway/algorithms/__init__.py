"""One small class per algorithm: it writes the per-token training signal of a finished group."""
