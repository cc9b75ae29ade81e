"""The engine's state as Prometheus text."""

from headway.core.protocol import EngineState

_METRICS = (
    ("running", "gauge", "Sequences in the batch"),
    ("waiting", "gauge", "Requests in line"),
    ("kv_usage", "gauge", "Share of the KV cache in use"),
    ("kv_capacity_tokens", "gauge", "Tokens the KV cache holds"),
    ("preemptions", "counter", "Sequences that gave up their blocks"),
    ("tokens_per_second", "gauge", "Tokens sampled per second, lately"),
    ("generated_tokens", "counter", "Tokens sampled since the start"),
    ("version", "gauge", "Policy version that is served"),
)


def prometheus(state: EngineState) -> str:
    lines = []
    for name, kind, text in _METRICS:
        full = f"headway_{name}_total" if kind == "counter" else f"headway_{name}"
        lines += [f"# HELP {full} {text}", f"# TYPE {full} {kind}", f"{full} {getattr(state, name)}"]
    return "\n".join(lines) + "\n"
