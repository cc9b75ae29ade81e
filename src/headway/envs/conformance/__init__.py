"""Conformance of an environment: what `headway env check` finds out about it, in processes of its own."""
