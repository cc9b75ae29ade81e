"""A host and its tenants over HTTP."""
