"""Tenants of an engine: whose token is whose, the engine as one of them sees it, and their shares of it."""
