"""Learning-rate schedules: pure functions of the step, so that a resumed run needs no state for them."""

import math
import reprlib

from headway.base.errors import PermanentError
from headway.base.imports import make_object
from headway.config.optimizers import Cosine, CustomSchedule, Linear, Schedule


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
    if isinstance(schedule, CustomSchedule):
        return _custom_rate(schedule, step, max_steps)
    return 1.0


def _custom_rate(schedule: CustomSchedule, step: int, max_steps: int) -> float:
    given = {"step": step, "max_steps": max_steps, **schedule.args}
    rate = make_object(schedule.path, given, "trainer.schedule.path", "headway.schedules")
    if not isinstance(rate, int | float) or not 0 <= rate < math.inf:
        raise PermanentError(
            f'trainer.schedule.path "{schedule.path}" returned {reprlib.repr(rate)} in step {step}; '
            "it must return a number >= 0"
        )
    return float(rate)
