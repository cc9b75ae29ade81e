"""Options of a contributor."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from headway.base.devices import resolve_device, resolve_dtype
from headway.base.errors import UsageError
from headway.swarm.messages.orders import Precision


@dataclass(frozen=True, slots=True)
class ContributeOptions:
    """A contributor's choices. `folder` holds its key and weights, `env` another id of the run's environment here."""

    url: str
    folder: Path
    run_key: bytes | None = None
    relays: Sequence[str] = ()
    env: str | None = None
    device: Literal["auto", "cpu", "cuda"] = "auto"
    threads: int | None = None
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    engine: Literal["embedded", "vllm"] = "embedded"

    def __post_init__(self) -> None:
        if self.engine == "vllm" and self.dtype == "bfloat16":
            raise UsageError(
                "a run would refuse what vLLM samples in bfloat16: it rounds otherwise than the run's verifier; leave "
                "--dtype out, or use --engine embedded"
            )

    @property
    def precision(self) -> Precision:
        """The precision to compute in."""
        import torch

        if self.engine == "vllm":
            return "float32"
        device = resolve_device(self.device, torch.cuda.is_available())
        return "bfloat16" if resolve_dtype(self.dtype, device) == "bfloat16" else "float32"
