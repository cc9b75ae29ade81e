"""Running a step: a runner for each kind of device."""
