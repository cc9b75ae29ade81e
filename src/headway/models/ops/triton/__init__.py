"""Triton kernels for CUDA. Imported by the registry when one is first called: to import Triton takes a second."""
