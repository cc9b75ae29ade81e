"""Settings of a host: one frozen model that many LoRA runs train and sample from."""

from typing import Self

from pydantic import Field, model_validator

from headway.config.base import Settings, broken_rule
from headway.config.cost import CostSettings
from headway.config.inference import ServeSettings
from headway.config.trainer import TrainSettings
from headway.core.tenants import NAME


class TenancySettings(Settings):
    address: str = "127.0.0.1"
    """Address at which tenants reach the host."""
    port: int = Field(default=8600, ge=0, le=65535)
    """Port of the host's service; 0 picks a free one, which the host keeps when it is started again."""
    tenants: int = Field(default=64, ge=1)
    """Tenants at a time."""
    rank: int = Field(default=64, ge=1)
    """Highest rank of a tenant's adapter."""
    adapter_memory_gb: float = Field(default=8.0, gt=0)
    """Memory of all adapters together, with their gradients and optimizers. Who would exceed it is refused."""
    batch_tokens: int = Field(default=2**22, ge=1)
    """Tokens of a tenant's batch, at most."""
    request_mb: int = Field(default=256, ge=1)
    """Size of a request, at most: a batch, or the checkpoint that a tenant continues from."""
    weights: dict[str, float] = {}
    """Shares of the trainer and of the engines by tenant's name; 1 for those that are not named."""
    floor: float = Field(default=0.05, ge=0, le=0.5)
    """Share of the trainer's time that a tenant gets at least while it has a batch, however small its weight; all
    alike where there are too many for that."""
    silent_seconds: float = Field(default=60.0, gt=0)
    """A tenant that says nothing for so long is not trained until it speaks again."""
    drop_seconds: float = Field(default=3600.0, gt=0)
    """A tenant that says nothing for so long is written to disk and leaves. It may join again."""

    @model_validator(mode="after")
    def _weights_are_of_tenants(self) -> Self:
        for name, weight in self.weights.items():
            if not NAME.fullmatch(name):
                raise broken_rule(
                    "weights", f"has {name!r}, which is no tenant's name: a-z, 0-9, '_' and '-', at most 40"
                )
            if not 0 < weight < float("inf"):
                raise broken_rule("weights", f"must be above 0 (got {weight} for {name!r})")
        return self


class HostSettings(TrainSettings, ServeSettings):
    """Settings of `headway host`. Of the trainer's, only those of memory are the host's: the rest is each tenant's."""

    host: TenancySettings = TenancySettings()
    """The service that tenants join, and their bounds and shares."""
    cost: CostSettings = CostSettings()
    """Prices, by which the trainer's time is divided among tenants."""

    @model_validator(mode="after")
    def _trainer_is_one_process(self) -> Self:
        if beyond := beyond_tenants(self):
            raise broken_rule(
                beyond[0], "must be left at its default: a host's trainer is one process on one device, without this"
            )
        return self


def beyond_tenants(settings: TrainSettings) -> list[str]:
    """Name the settings that ask for what a trainer of tenants does not have."""
    trainer = settings.trainer
    used = {
        "placement.trainer_ranks": settings.placement.trainer_ranks > 1,
        "model.implementation": settings.model.implementation != "headway",
        "model.compute": settings.model.compute != "dtype",
        "trainer.activations.offload": trainer.activations.offload,
        "trainer.optimizer_on_cpu": trainer.optimizer_on_cpu,
        "trainer.compile": trainer.compile,
    }
    return [name for name, is_used in used.items() if is_used]
