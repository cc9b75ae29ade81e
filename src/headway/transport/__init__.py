"""Transports of batches and weights between processes, and the client of the inference protocol."""
