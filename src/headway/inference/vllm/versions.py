"""Where the vLLMs that Headway drives, 0.26 to 0.32, differ. All else that is used of them is the same."""

from dataclasses import fields


def counts_versions() -> bool:
    """Since 0.32 vLLM says with a reply which weights sampled its tokens, if it is told what they are called."""
    from vllm.outputs import CompletionOutput

    return "weight_versions" in {field.name for field in fields(CompletionOutput)}
