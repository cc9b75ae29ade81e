"""One small model of a family, in transformers' code and in ours, with equal weights in which nothing is trivial."""

import json
from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from headway.config.trainer import ActivationSettings
from headway.models.attention import PackedPlan
from headway.models.build import build_model
from headway.models.checkpoints.folders import load_model
from headway.models.checkpoints.tensors import base_parameters, hf_tensors
from headway.models.config import ModelConfig
from headway.models.decoder import DecoderLM
from headway.models.family import Family
from headway.models.packed import ModelOutput, PackedTokens
from headway.models.registry import find_family, load_config
from headway.trainer.memory.recompute import recompute_policy

HERE = Path(__file__).parent
CASES = sorted(str(path.relative_to(HERE).with_suffix("")) for path in HERE.glob("*/*.json"))
"""family/case, one for each config.json in the folders beside this file."""


class FamilyCase:
    """The model of `name`.json, saved by transformers to `folder`."""

    def __init__(self, name: str, folder: Path) -> None:
        self.name, self.folder = name, folder
        self.hf = make_hf_model(json.loads((HERE / f"{name}.json").read_text()))
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


def make_hf_model(values: dict[str, Any]) -> Any:
    """Build transformers' model of a config.json, in float32, and draw its weights."""
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.for_model(**values)
    # Its other implementations of attention ignore some settings, and its grouped products refuse odd sizes.
    config._experts_implementation = "eager"
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)  # some start from random numbers of their own, such as the decay of Mamba
        model = AutoModelForCausalLM.from_config(config, attn_implementation="eager", dtype=torch.float32)
    for module in model.modules():
        if isinstance(module, nn.Embedding):
            module.padding_idx = None  # its gradient of that row would be zero, whether a sample has the token or not
    perturb(model)
    return model.eval()


def load_hf_model(folder: Path) -> tuple[Any, dict[str, Any]]:
    """Load a checkpoint in transformers: the model and its report of what did not fit."""
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.from_pretrained(folder)
    config._experts_implementation = "eager"
    model, report = AutoModelForCausalLM.from_pretrained(
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


def hf_logits(reference: Any, ids_T: Tensor, lengths: list[int]) -> Tensor:
    """Each sample alone."""
    return torch.cat([reference(ids[None], use_cache=False).logits[0] for ids in ids_T.split(lengths)])


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
