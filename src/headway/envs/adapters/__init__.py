"""Environments of other packages, each behind one file."""
