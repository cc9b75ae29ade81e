"""Rows of a pass and their adapters: slots of a bank, or blocks with adapters of their own."""
