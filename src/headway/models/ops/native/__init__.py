"""C kernels for serving on CPU."""
