"""Scheduling: which sequences run in a step, and which cache blocks they hold."""
