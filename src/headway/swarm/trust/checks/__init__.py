"""Checks of contributions: each a small class that looks at one kind of lie and decides by itself."""
