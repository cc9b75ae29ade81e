"""Weights from trainer to engines: filesystem, collective, shared memory; fingerprints."""
