"""Where the vLLMs that Headway drives, 0.26 to 0.32, differ. All else of what is used is the same in them.

0.32 says with a reply which weights have sampled its tokens, if it is told what they are called, and it can hold a
reply's tokens back until the last. Before, every token comes as it is sampled, and the engine counts.
"""

from dataclasses import fields
from typing import Any


def counts_versions() -> bool:
    """vLLM says itself which weights sampled a token."""
    from vllm.outputs import CompletionOutput

    return "weight_versions" in {field.name for field in fields(CompletionOutput)}


def in_one_piece(room: int) -> dict[str, Any]:
    """Parameters of a reply that comes as a whole, of a vLLM that counts versions. The first of its at most `room`
    tokens comes at once all the same, which tells that the request has started."""
    return {"stream_interval": max(room, 1)}
