"""Images for the tests of engines, and the training pass to compare with."""

import io

import torch
from PIL import Image

from headway.core.images import TokenImages
from headway.inference.images import ServedImage
from headway.models.attention import PackedPlan
from headway.models.packed import PackedTokens
from headway.models.vision.config import VisionConfig
from headway.models.vision.decoder import VisionLM
from headway.models.vision.inputs import image_tokens, put_on_cpu


def expected(model: VisionLM, tokens: list[int], images: tuple[ServedImage, ...]) -> torch.Tensor:
    """Logprobs (tokens - 1) of a training pass over prompt and reply."""
    config, ids = model.config, torch.tensor(tokens)
    assert isinstance(config, VisionConfig)
    plan = PackedPlan([len(tokens)])
    seen = None
    if images:
        parts = [(image.use.digest, image.grid, image.patches) for image in images]
        joined = TokenImages.of(parts, [(image.use.at, number) for number, image in enumerate(images)])
        seen = image_tokens(joined, [len(tokens)], config, put_on_cpu)
    with torch.no_grad():
        logits = model.logits(model(PackedTokens(ids, plan.positions, plan, images=seen)).hidden_TD)
    return torch.log_softmax(logits[:-1], -1).gather(1, ids[1:, None])[:, 0]


def drawn(color: str, size: tuple[int, int] = (32, 24), kind: str = "PNG", **options: object) -> bytes:
    stream = io.BytesIO()
    Image.new("RGB", size, color).save(stream, kind, **options)
    return stream.getvalue()
