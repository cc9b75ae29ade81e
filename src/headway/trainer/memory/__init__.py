"""Trading compute and host memory for device memory."""
