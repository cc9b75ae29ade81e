"""Images of requests as vLLM takes them. The numbers are those that our processor makes, and the places of an image's
tokens those that our renderer gave them: vLLM's own processor, which resizes in other arithmetic, has no part in it."""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from headway.core.protocol import GenerateRequest
from headway.inference.images import RequestImages, ServedImage
from headway.inference.vllm.internals import image_prompt
from headway.models.images.processor import ImageProcessor, SquareProcessor


@dataclass(frozen=True, slots=True)
class PromptImages:
    """The images of one prompt. `inputs` are named as in the output of their family's Hugging Face processor."""

    images: Sequence[ServedImage]
    inputs: dict[str, Tensor]

    def prompt(self, llm: Any, token_ids: list[int], salt: str) -> Any:
        """Make the input of vLLM's engine. What it keeps of an image it finds again under the same `salt` only."""
        names = [f"{salt}.{image.use.digest}" for image in self.images]
        places = [(image.use.at, image.use.tokens) for image in self.images]
        return image_prompt(llm, token_ids, self.inputs, names, places, salt)


class ImageInputs:
    """Reads the images of requests for a model that computes in `dtype`."""

    def __init__(self, images: RequestImages, dtype: torch.dtype) -> None:
        self._images, self._dtype = images, dtype

    async def read(self, request: GenerateRequest) -> PromptImages:
        """Decode a request's images. Raises RequestError where they can't be taken."""
        images = await self._images.read(request)
        inputs = await asyncio.to_thread(model_inputs, self._images.processor, images, self._dtype)
        return PromptImages(images, inputs)

    def close(self) -> None:
        self._images.close()


def model_inputs(processor: ImageProcessor, images: Sequence[ServedImage], dtype: torch.dtype) -> dict[str, Tensor]:
    """Name the numbers of images as the models take them: whole squares, or patches and grids."""
    if isinstance(processor, SquareProcessor):
        squares = [torch.from_numpy(processor.pixels(image.grid, image.patches)) for image in images]
        # Of an image that is cut into crops there would be more.
        return {
            "pixel_values": torch.stack(squares).to(dtype),
            "num_patches": torch.ones(len(images), dtype=torch.int64),
        }
    patches = torch.cat([torch.from_numpy(image.patches) for image in images])
    return {"pixel_values": patches.to(dtype), "image_grid_thw": torch.tensor([list(image.grid) for image in images])}
