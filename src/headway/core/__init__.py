"""What processes say to each other: tasks, episodes, samples, batches, versions, the wire. No torch."""
