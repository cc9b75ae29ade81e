"""Rollouts from machines that nobody vouches for: signed work orders, checks of the answers, trust and its ledger."""
