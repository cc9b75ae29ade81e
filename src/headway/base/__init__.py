"""The ground that every room stands on: errors, files, processes, devices and packages of a machine. No training."""
