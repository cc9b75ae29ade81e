"""Deployments: a run on machines that a scheduler gives out."""
