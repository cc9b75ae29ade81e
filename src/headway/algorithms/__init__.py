"""One file per algorithm: a small class that writes per-token training signals."""
