"""How much a vLLM takes, and what it can do."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Limits:
    """`counts_versions`: vLLM says itself which weights sampled a token. `seeds`: whether requests may have one."""

    max_running: int
    max_waiting: int
    kv_capacity_tokens: int
    counts_versions: bool = True
    seeds: bool = True
