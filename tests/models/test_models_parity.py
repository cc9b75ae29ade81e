"""Logits and gradients equal Hugging Face's, whatever the shape; packed samples never see each other."""

from pathlib import Path
from typing import Any

import pytest
import torch
from models_common import hf_logits, hf_model, packed_logits, random_model, random_tokens, small

from headway.models.config import RopeScaling

LLAMA3 = RopeScaling("llama3", 8.0, 1.0, 4.0, original_max_len=32)

SHAPES: list[tuple[str, dict[str, Any]]] = [
    ("llama", {}),
    ("llama", {"tied": True, "heads": 3, "kv_heads": 1, "head_dim": 10, "width": 33, "mlp_width": 51}),
    ("llama", {"kv_heads": 4, "attention_bias": True, "mlp_bias": True}),
    ("llama", {"rope_scaling": LLAMA3, "rope_theta": 500_000.0}),
    ("llama", {"rope_scaling": RopeScaling("linear", 4.0)}),
    ("qwen3", {}),
    ("qwen3", {"tied": True, "heads": 6, "kv_heads": 3, "head_dim": 8, "width": 40, "vocab_size": 101}),
    ("qwen3", {"layers": 3, "kv_heads": 1, "attention_bias": True, "norm_eps": 1e-5, "rope_theta": 1e6}),
    ("qwen3_moe", {}),
    ("qwen3_moe", {"tied": True, "normalize_gates": False, "experts": 3, "experts_per_token": 3}),
    ("qwen3_moe", {"layers": 3, "dense_layers": (1,), "experts": 7, "experts_per_token": 1, "expert_width": 10}),
]


@pytest.mark.parametrize(("family", "changes"), SHAPES)
def test_logits_equal_hugging_face(family: str, changes: dict[str, Any], tmp_path: Path) -> None:
    config = small(family, **changes)
    model = random_model(config)
    lengths = [9, 1, 30, 4]
    ids = random_tokens(config, lengths)
    with torch.no_grad():
        ours = packed_logits(model, ids, lengths)
        theirs = hf_logits(hf_model(model, tmp_path / "model"), ids, lengths)
    assert ours.dtype == torch.float32
    assert theirs.std() > 0.1
    torch.testing.assert_close(ours, theirs, atol=1e-4, rtol=0)


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
def test_gradients_equal_hugging_face(family: str, tmp_path: Path) -> None:
    from headway.models.checkpoints.tensors import hf_tensors

    config = small(family, tied=True)
    model = random_model(config)
    reference = hf_model(model, tmp_path / "model")
    lengths = [12, 5, 7]
    ids = random_tokens(config, lengths)
    weights = torch.randn(sum(lengths), config.vocab_size, generator=torch.Generator().manual_seed(3))
    (packed_logits(model, ids, lengths) * weights).sum().backward()
    (hf_logits(reference, ids, lengths) * weights).sum().backward()
    # The reference's gradients through our own loader: put them where its weights are and read them back.
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(parameter.grad)  # type: ignore[arg-type]
    ours = dict(hf_tensors(model))
    compared = 0
    for name, parameter in reference.named_parameters():
        if name in ours:
            torch.testing.assert_close(ours[name], parameter.grad, atol=2e-4, rtol=1e-4)
            compared += 1
    assert compared >= 2 + 6 * config.layers


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
