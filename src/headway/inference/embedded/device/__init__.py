"""An accelerator beside the host: copies in flight, CUDA graphs, a clock."""
