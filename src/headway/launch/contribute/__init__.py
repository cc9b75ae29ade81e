"""Work for a swarm with this machine."""
