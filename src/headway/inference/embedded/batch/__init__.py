"""The running sequences as arrays, and the tokens of a step."""
