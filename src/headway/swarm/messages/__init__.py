"""Messages between a run and strangers: their encoding, signatures, orders, verdicts and routes."""
