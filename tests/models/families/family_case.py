"""One small model of a family, in transformers' code and in ours, with equal weights in which nothing is trivial."""

import json
from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from headway.config.trainer import ActivationSettings
from headway.core.images import Grid, TokenImages, join_images
from headway.models.attention import PackedPlan
from headway.models.build import build_model
from headway.models.checkpoints.folders import load_model
from headway.models.checkpoints.tensors import base_parameters, hf_tensors
from headway.models.configs.config import ModelConfig
from headway.models.decoder import DecoderLM
from headway.models.family import Family
from headway.models.packed import ModelOutput, PackedTokens
from headway.models.registry import find_family, load_config
from headway.models.vision.config import VisionConfig
from headway.models.vision.inputs import image_tokens, put_on_cpu
from headway.models.vision.places import feature_count, feature_places
from headway.trainer.memory.recompute import recompute_policy

HERE = Path(__file__).parent
CASES = sorted(str(path.relative_to(HERE).with_suffix("")) for path in HERE.glob("*/*.json"))
"""family/case, one for each config.json in the folders beside this file."""


class FamilyCase:
    """The model of `name`.json, saved by transformers to `folder`."""

    def __init__(self, name: str, folder: Path) -> None:
        self.name, self.folder = name, folder
        values = json.loads((HERE / f"{name}.json").read_text())
        self.grids: dict[int, list[Grid]] = {
            int(sample): [Grid(*grid) for grid in grids] for sample, grids in values.pop("images", {}).items()
        }
        """The images of samples, by the sample's number. Equal grids are the same image; where all images of a model
        have one size, grids only tell images apart."""
        self.hf = make_hf_model(values)
        self.hf.save_pretrained(folder)
        self.own = not name.startswith("transformers/")
        """Run by Headway's code, not by Hugging Face's."""

    @cached_property
    def config(self) -> ModelConfig:
        return load_config(self.folder, "headway" if self.own else "transformers")

    @property
    def family(self) -> Family:
        return find_family(self.config.family)

    @cached_property
    def model(self) -> DecoderLM:
        """Ours. Tests leave its weights alone; those that change some take a `fresh` one."""
        return self.fresh()

    def fresh(self) -> DecoderLM:
        return self.load(self.folder)

    def load(self, folder: Path) -> DecoderLM:
        return load_model(folder, config=self.config)

    def recomputed(self, checkpoint: str) -> DecoderLM:
        """Ours, whose activations are recomputed in the backward pass."""
        settings = ActivationSettings.model_validate({"checkpoint": checkpoint})
        model = build_model(self.config, seed=None, recompute=recompute_policy(settings, self.config.layers))
        model.load_state_dict(self.model.state_dict())
        return model

    def tokens(self, lengths: Sequence[int], seed: int = 0) -> Tensor:
        draw = torch.Generator().manual_seed(seed)
        return torch.randint(0, self.config.vocab_size, (sum(lengths),), generator=draw)

    def samples(self, lengths: Sequence[int]) -> tuple[Tensor, TokenImages | None]:
        """Tokens of samples, with the placeholders of their images, and these images."""
        ids_T, config = self.tokens(lengths), self.config
        if not self.grids:
            return ids_T, None
        assert isinstance(config, VisionConfig)
        ids_T[(ids_T == config.image_token) | (ids_T == config.video_token)] = 0
        images = join_images([(length, self._images(n)) for n, length in enumerate(lengths)])
        assert images is not None
        ids_T[feature_places(images, config.tower.merge)[0]] = config.image_token
        return ids_T, images

    def _images(self, sample: int) -> TokenImages | None:
        """Images from the sample's second token on, with two tokens between them."""
        grids = self.grids.get(sample, [])
        if not grids:
            return None
        assert isinstance(self.config, VisionConfig)
        tower = self.config.tower
        images, uses, start = [], list[tuple[int, int]](), 1
        for number, grid in enumerate(grids):
            draw, shape = np.random.default_rng(grid), tower.only_grid or grid
            patches = draw.standard_normal((shape.patches, tower.patch_numbers), dtype=np.float32)
            images.append((str(grid), shape, patches))
            uses.append((start, number))
            start += feature_count(shape, tower.merge) + 2
        return TokenImages.of(images, uses)

    def extra(self, images: TokenImages | None, lengths: Sequence[int]) -> dict[str, Any]:
        """Inputs of our model beside tokens."""
        if images is None:
            return {}
        assert isinstance(self.config, VisionConfig)
        return {"images": image_tokens(images, lengths, self.config, put_on_cpu)}


def make_hf_model(values: dict[str, Any]) -> Any:
    """Build transformers' model of a config.json, in float32, and draw its weights."""
    from transformers import AutoConfig

    config = AutoConfig.for_model(**values)
    # Its other implementations of attention ignore some settings, and its grouped products refuse odd sizes.
    config._experts_implementation = "eager"
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)  # some start from random numbers of their own, such as the decay of Mamba
        model = hf_class(config).from_config(config, attn_implementation="eager", dtype=torch.float32)
    for module in model.modules():
        if isinstance(module, nn.Embedding):
            module.padding_idx = None  # its gradient of that row would be zero, whether a sample has the token or not
    perturb(model)
    return model.eval()


def hf_class(config: Any) -> Any:
    """The class that builds and loads models of transformers' config."""
    from transformers import AutoModelForCausalLM, AutoModelForImageTextToText

    return AutoModelForImageTextToText if hasattr(config, "vision_config") else AutoModelForCausalLM


def load_hf_model(folder: Path) -> tuple[Any, dict[str, Any]]:
    """Load a checkpoint in transformers: the model and its report of what did not fit."""
    from transformers import AutoConfig

    config = AutoConfig.from_pretrained(folder)
    config._experts_implementation = "eager"
    model, report = hf_class(config).from_pretrained(
        folder, config=config, attn_implementation="eager", dtype=torch.float32, output_loading_info=True
    )
    return model.eval(), report


def perturb(model: nn.Module, seed: int = 0) -> None:
    """Move every number that a checkpoint holds: norms off 1 and biases off 0, which would hide a missing one;
    matrices large enough that every token depends visibly on every other."""
    draw = torch.Generator().manual_seed(seed)
    saved = set(model.state_dict())
    named = [*model.named_parameters(), *((name, x) for name, x in model.named_buffers() if name in saved)]
    with torch.no_grad():
        for _, tensor in named:
            if tensor.dim() > 1:
                tensor.normal_(0.0, 0.15, generator=draw)
            elif tensor.is_floating_point():
                tensor.add_(torch.randn(tensor.shape, generator=draw) * 0.3)


def run_packed(model: DecoderLM, ids_T: Tensor, lengths: Sequence[int], **extra: Any) -> ModelOutput:
    device = model.head_weight().device
    plan = PackedPlan(lengths, device)
    output: ModelOutput = model(PackedTokens(ids_T.to(device), plan.positions, plan, **extra))
    return output


def packed_logits(model: DecoderLM, ids_T: Tensor, lengths: Sequence[int], **extra: Any) -> Tensor:
    return model.logits(run_packed(model, ids_T, lengths, **extra).hidden_TD)


def hf_logits(reference: Any, ids_T: Tensor, lengths: list[int], images: TokenImages | None = None) -> Tensor:
    """Each sample alone."""
    logits, first = [], 0
    for ids in ids_T.split(lengths):
        extra = {} if images is None else hf_images(reference, ids, images, first)
        logits.append(reference(ids[None], use_cache=False, **extra).logits[0])
        first += len(ids)
    return torch.cat(logits)


def hf_images(reference: Any, ids: Tensor, images: TokenImages, first: int) -> dict[str, Tensor]:
    """The images of the sample that begins at token `first`, as transformers takes them."""
    own = [image for start, image in images.uses.tolist() if first <= start < first + len(ids)]
    if not own:
        return {}
    patches, kinds = images.split(), (ids == reference.config.image_token_id).int()[None]
    if hasattr(reference.config, "mm_tokens_per_image"):
        sides = [int(reference.config.mm_tokens_per_image**0.5)] * 2
        pixels = [image_pixels(patches[image], images.shapes[image], sides) for image in own]
        return {"pixel_values": torch.from_numpy(np.stack(pixels)), "token_type_ids": kinds}
    return {
        "pixel_values": torch.from_numpy(np.concatenate([patches[image] for image in own])),
        "image_grid_thw": torch.from_numpy(images.grids[own]).long(),
        "mm_token_type_ids": kinds,
    }


def image_pixels(patches: np.ndarray, grid: Grid, features: Sequence[int]) -> np.ndarray:
    """The pixels (channels, rows, columns) that patches were cut from; they lie feature by feature."""
    merge, side = grid.rows // features[0], int((patches.shape[1] // 3) ** 0.5)
    cut = patches.reshape(*features, merge, merge, 3, side, side).transpose(4, 0, 2, 5, 1, 3, 6)
    return np.ascontiguousarray(cut).reshape(3, grid.rows * side, grid.columns * side)


def token_logprobs(model: DecoderLM, sequences: list[list[int]], **extra: Any) -> list[Tensor]:
    """The trainer's logprob of each token except the first, for every sequence, in one packed pass."""
    lengths = [len(tokens) for tokens in sequences]
    ids_T = torch.tensor([token for tokens in sequences for token in tokens])
    with torch.no_grad():
        logprobs_TV = torch.log_softmax(packed_logits(model, ids_T, lengths, **extra), -1).cpu()
    parts = zip(logprobs_TV.split(lengths), ids_T.split(lengths), strict=True)
    return [logprobs[:-1].gather(1, ids[1:, None])[:, 0] for logprobs, ids in parts]


def gradients(model: DecoderLM) -> dict[str, Tensor]:
    """Our gradients under the checkpoint's names. The model's weights are lost."""
    with torch.no_grad():
        for _, parameter in base_parameters(model):
            parameter.copy_(torch.zeros_like(parameter) if parameter.grad is None else parameter.grad)
    return {name: tensor.clone() for name, tensor in hf_tensors(model)}


def hf_gradients(reference: Any, folder: Path) -> dict[str, Tensor]:
    """Those of transformers' model, written to `folder` as if they were its weights, which are restored."""
    from headway.models.checkpoints.folders import read_tensors

    kept = {name: tensor.clone() for name, tensor in reference.state_dict().items()}
    with torch.no_grad():
        for tensor in reference.state_dict().values():
            tensor.zero_()
        for parameter in reference.parameters():
            if parameter.grad is not None:
                parameter.copy_(parameter.grad)
    reference.save_pretrained(folder)
    reference.zero_grad()
    reference.load_state_dict(kept)
    return dict(read_tensors(folder))
