"""Learning-rate schedules: pure functions of the step, so that a resumed run needs no state for them."""

import math

from headway.config.trainer import Cosine, Linear, Schedule


def rate_at(schedule: Schedule, step: int, max_steps: int) -> float:
    """Return the factor of the learning rate in step 1 .. max_steps."""
    if step <= schedule.warmup_steps:
        return step / schedule.warmup_steps
    if isinstance(schedule, Cosine):
        span = max(1, max_steps - schedule.warmup_steps)
        done = min(1.0, (step - schedule.warmup_steps) / span)
        return schedule.min_ratio + (1 - schedule.min_ratio) * 0.5 * (1 + math.cos(math.pi * done))
    if isinstance(schedule, Linear) and schedule.decay_steps:
        left = max(0, max_steps - step) / schedule.decay_steps
        return schedule.min_ratio + (1 - schedule.min_ratio) * min(1.0, left)
    return 1.0
