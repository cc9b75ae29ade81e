"""Work of a swarm: who wants it, gives it, takes it, and the service that strangers reach."""
