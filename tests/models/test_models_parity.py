"""Logits equal Hugging Face's, whatever the shape; packed samples never see each other.

`families/` compares every family in depth."""

from pathlib import Path
from typing import Any

import pytest
import torch
from models_common import hf_logits, hf_model, packed_logits, random_model, random_tokens, small


@pytest.mark.parametrize("family", ["llama", "qwen3", "qwen3_moe"])
@pytest.mark.parametrize("seed", range(4))
def test_random_shapes_equal_hugging_face(family: str, seed: int, tmp_path: Path) -> None:
    draw = torch.Generator().manual_seed(100 + seed)

    def between(low: int, high: int) -> int:
        return int(torch.randint(low, high + 1, (), generator=draw))

    kv_heads = between(1, 3)
    changes: dict[str, Any] = {
        "kv_heads": kv_heads,
        "heads": kv_heads * between(1, 3),
        "head_dim": 2 * between(2, 12),
        "width": kv_heads * 6 * between(1, 8) if family == "llama" else between(9, 60),
        "mlp_width": between(9, 90),
        "layers": between(1, 3),
        "vocab_size": between(20, 120),
        "tied": bool(between(0, 1)),
    }
    if family == "qwen3_moe":
        experts = between(2, 9)
        changes |= {"experts": experts, "experts_per_token": between(1, experts), "expert_width": between(3, 40)}
    config = small(family, **changes)
    model = random_model(config, seed)
    lengths = [between(1, 40) for _ in range(between(1, 6))]
    ids = random_tokens(config, lengths, seed)
    with torch.no_grad():
        ours = packed_logits(model, ids, lengths)
        theirs = hf_logits(hf_model(model, tmp_path / "model"), ids, lengths)
    torch.testing.assert_close(ours, theirs, atol=1e-4, rtol=0)


@pytest.mark.parametrize("family", ["llama", "qwen3", "qwen3_moe"])
@pytest.mark.parametrize("lengths", [[1], [8, 8, 8], [3, 17, 1, 64, 5, 5, 33], [1, 1, 1, 1]])
def test_packed_equals_separate_forward_and_backward(family: str, lengths: list[int]) -> None:
    config = small(family)
    ids = random_tokens(config, lengths)
    weights = torch.randn(sum(lengths), config.vocab_size, generator=torch.Generator().manual_seed(3))
    packed, separate = random_model(config), random_model(config)
    together = packed_logits(packed, ids, lengths)
    alone = torch.cat([packed_logits(separate, part, [len(part)]) for part in ids.split(lengths)])
    torch.testing.assert_close(together, alone, atol=1e-5, rtol=1e-5)
    (together * weights).sum().backward()
    (alone * weights).sum().backward()
    for (name, ours), theirs in zip(packed.named_parameters(), separate.parameters(), strict=True):
        torch.testing.assert_close(ours.grad, theirs.grad, atol=1e-3, rtol=1e-4, msg=name)


def test_a_changed_sample_leaves_its_neighbours_to_the_bit() -> None:
    config = small("qwen3")
    model = random_model(config)
    lengths = [6, 11, 9]
    ids = random_tokens(config, lengths)
    other = ids.clone()
    other[6:17] = (other[6:17] + 1) % config.vocab_size
    with torch.no_grad():
        before, after = packed_logits(model, ids, lengths), packed_logits(model, other, lengths)
    assert torch.equal(before[:6], after[:6]) and torch.equal(before[17:], after[17:])
    assert not torch.equal(before[6:17], after[6:17])
