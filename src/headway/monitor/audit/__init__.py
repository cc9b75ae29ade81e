"""The audit of a run: signs in its recorded rollouts that a reward is had without doing the task."""
