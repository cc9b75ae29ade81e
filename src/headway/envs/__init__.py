"""The environment protocol, the worker pool, bundled environments and adapters."""
