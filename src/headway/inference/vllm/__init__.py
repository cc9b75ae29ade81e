"""vLLM behind the same protocol: its engine in processes of its own, our server in front."""
