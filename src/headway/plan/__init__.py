"""Plans: what a run would need, take and cost, from measured speeds and the orchestrator itself on simulated time."""
