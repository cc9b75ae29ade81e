"""The default engine in plain PyTorch: scheduler, cache, runner, sampler, engine."""
