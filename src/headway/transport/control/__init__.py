"""The control of a run, two ways: through the files of its folder, or over HTTP from any host."""
