"""Inputs of a step: the running sequences as arrays, and the tokens that it computes."""
