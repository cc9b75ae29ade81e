"""Routed experts: who goes where, products of groups of rows, and their sums."""
