"""The policy behind HTTP: the server, the embedded engine, the vLLM engine."""
