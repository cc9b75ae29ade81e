"""Running a step: inputs, attention over the paged cache, CUDA graphs, sampling."""
