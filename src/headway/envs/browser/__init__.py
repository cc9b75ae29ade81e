"""Tasks on local web sites, in a real Chromium that reaches nothing else."""
