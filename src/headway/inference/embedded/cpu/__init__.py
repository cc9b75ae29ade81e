"""A second way to run a step, for small dense models on a CPU: the whole pass, and drawing tokens, as one call into C.

Optional: where it can't be compiled, or lacks a part of the model, the layers do the work. Tests hold it to them.
"""
