"""Batches: packing samples into micro-batches and sending them."""
