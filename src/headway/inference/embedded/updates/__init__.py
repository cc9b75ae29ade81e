"""Weight updates: receive, probe, switch."""
