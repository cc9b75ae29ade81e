"""Model families: one folder each, holding everything that a family is."""
