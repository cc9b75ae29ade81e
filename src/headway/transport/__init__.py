"""How batches and weights travel between processes, and the client of the inference protocol."""
