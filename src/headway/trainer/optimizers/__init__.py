"""Optimizers: update rules, Muon, learning-rate schedules."""
