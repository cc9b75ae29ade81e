"""Engines pass a version on to each other in a tree, so that the trainer sends it once, however many there are."""
