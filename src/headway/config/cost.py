"""Settings of what a run costs: prices, and the power of devices that cannot be measured."""

from pydantic import Field

from headway.config.base import Settings


class CostSettings(Settings):
    currency: str = "USD"
    """Name of the money that prices are in."""
    gpu_hour: float = Field(default=0.0, ge=0)
    """Price of one GPU for an hour, with the machine around it. 0: not known, and no money is shown for it."""
    core_hour: float = Field(default=0.0, ge=0)
    """Price of one CPU core for an hour, for runs without GPUs."""
    kwh: float = Field(default=0.0, ge=0)
    """Price of a kilowatt hour, where energy is paid for apart from the devices."""
    gpu_watts: float = Field(default=500.0, gt=0)
    """Power of one GPU, for the estimate where it cannot be measured."""
    core_watts: float = Field(default=8.0, gt=0)
    """Power of one busy CPU core, for the estimate where it cannot be measured."""
