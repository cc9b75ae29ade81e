"""Settings of an inference server."""

from typing import Any, Literal, Self

from pydantic import Field, model_validator

from headway.config.base import Settings, broken_rule
from headway.config.shared import SharedSettings
from headway.core.routing import Role


class InferenceSettings(Settings):
    engine: Literal["auto", "embedded", "vllm"] = "auto"
    """auto: vLLM where it is installed and a GPU is present, the embedded engine otherwise."""
    host: str = "127.0.0.1"
    """Address to listen at. Any other than loopback demands a token."""
    port: int = Field(default=8000, ge=0, le=65535)
    """Port; 0 picks a free one."""
    served_model_name: str | None = Field(default=None, min_length=1)
    """Name by which clients may ask for the model, beside `policy`. Default: that of its folder."""
    max_running: int = Field(default=256, ge=1)
    """Sequences in one decode step, at most."""
    max_waiting: int = Field(default=4096, ge=0)
    """Requests that may queue before new ones get 503."""
    max_batched_tokens: int = Field(default=2048, ge=1)
    """Tokens in one step, prefill chunks included. On GPUs more unless it is set: 8192, or what vLLM chooses."""
    block_size: int = Field(default=16, ge=1)
    """Tokens per block of the embedded engine's KV cache. vLLM chooses its own."""
    kv_memory_gb: float | None = Field(default=None, gt=0)
    """Memory of the KV cache. Default: a share of what is free; on GPUs vLLM takes its own share."""
    kv_dtype: Literal["auto", "fp8"] = "auto"
    """Precision of the KV cache. auto: the model's, `model.dtype`. fp8: half of bfloat16's memory, for more tokens and
    faster long contexts, at some mismatch with the trainer."""
    kv_host_memory_gb: float = Field(default=0.0, ge=0)
    """Host memory for KV blocks that the cache had to give up, for long conversations in turns: 0 for none. vLLM's own
    offload on GPUs."""
    kv_store: str | None = None
    """Folder of KV blocks that engines share and that outlives them. It gets what goes to host memory, which must not
    be 0. Embedded engine only."""
    kv_store_gb: float = Field(default=10.0, gt=0)
    """Size of that folder; what was used longest ago is removed."""
    prefix_cache: bool = True
    """Reuse KV blocks of equal prefixes."""
    role: Role = "both"
    """prefill: take prompts, and leave each reply to another engine after its first token; decode: go on with those,
    on the KV that comes from there. vLLM moves it by NIXL (extra `nixl`)."""
    max_adapters: int = Field(default=8, ge=1)
    """LoRA adapters on the device at a time. Others wait in host memory until a request asks for them."""
    max_host_adapters: int = Field(default=64, ge=1)
    """LoRA adapters kept in host memory, those on the device included. The one used longest ago goes first, and has to
    be sent again."""
    tenants: bool = False
    """Serve tenants only, from the start: without a tenant's token or the server's own nothing but /health answers."""
    threads: int | None = Field(default=None, ge=1)
    """CPU threads. Default: all cores."""
    compute: Literal["dtype", "fp8"] | None = None
    """Precision in which the engines compute the products of linear layers. Default: the trainer's, `model.compute`.
    Weights are sent in `model.dtype` and quantized as they arrive."""
    vllm: dict[str, Any] = {}
    """Any argument of vLLM's engine under its own name, such as gpu_memory_utilization. These win over the settings
    above; what this vLLM does not know is refused with the nearest name."""

    @property
    def kv_fp8(self) -> bool:
        return self.kv_dtype == "fp8"

    @model_validator(mode="after")
    def _store_below_host_memory(self) -> Self:
        if self.kv_store is not None and not self.kv_host_memory_gb:
            raise broken_rule("kv_store", "needs kv_host_memory_gb above 0: blocks pass through host memory")
        return self

    @model_validator(mode="after")
    def _host_memory_has_all_adapters(self) -> Self:
        if self.max_host_adapters < self.max_adapters:
            raise broken_rule(
                "max_host_adapters",
                f"must be at least max_adapters, {self.max_adapters} (got {self.max_host_adapters})",
            )
        return self

    @model_validator(mode="after")
    def _one_token_per_sequence(self) -> Self:
        if self.max_batched_tokens < self.max_running:
            raise broken_rule(
                "max_batched_tokens",
                f"must be at least max_running, which is {self.max_running} (got {self.max_batched_tokens}): "
                "every running sequence decodes one token per step",
            )
        return self


class ServeSettings(SharedSettings):
    """Settings of `headway serve`."""

    inference: InferenceSettings = InferenceSettings()
    """The server of the policy."""

    @model_validator(mode="after")
    def _implementation_allows_fp8(self) -> Self:
        if self.inference.compute == "fp8" and self.model.implementation == "transformers":
            raise broken_rule("inference.compute", 'must be "dtype" with model.implementation = "transformers"')
        return self

    @property
    def serves_fp8(self) -> bool:
        return (self.inference.compute or self.model.compute) == "fp8"
