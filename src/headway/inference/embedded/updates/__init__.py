"""Weight updates: receive, probe, switch; adapters."""
