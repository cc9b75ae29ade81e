"""Batches from orchestrator to trainer: zmq and filesystem."""
