"""Sandboxes on other machines: the host service with its client, and adapters to services that rent them out."""
