"""Collect: finished groups become scored, filtered training samples."""
