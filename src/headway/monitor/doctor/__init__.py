"""Findings about this machine and its packages, each problem with its remedy. Imports nothing heavy."""
