"""What this machine can do: packages, devices, resources, each finding with its remedy. Imports nothing heavy."""
