"""Weights for strangers: versions as signed manifests and shards, downloads and relays."""
