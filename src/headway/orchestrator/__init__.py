"""The orchestrator keeps episodes in flight, bounds their staleness, packs batches and brings weights to the fleet."""
