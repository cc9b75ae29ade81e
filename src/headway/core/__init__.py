"""The types that processes exchange: tasks, episodes, samples, batches, versions, the wire. No torch."""
