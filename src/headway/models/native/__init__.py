"""Small C kernels for serving on CPU, each beside the plain function that it must equal; see `library.enable`."""
