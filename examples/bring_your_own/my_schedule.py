"""A schedule of one's own: the factor of the learning rate in a step, which counts from 1."""


def sawtooth(step: int, max_steps: int, period: int = 10) -> float:
    """Fall from 1 to 1/period, over and over."""
    return 1 - ((step - 1) % period) / period
