"""Run records: directories, logs, metrics and their sinks."""
