"""KV from the engine that prefilled a prompt to the one that goes on with it."""
