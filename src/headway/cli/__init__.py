"""One file per command. Thin: parse, load settings, hand over."""
