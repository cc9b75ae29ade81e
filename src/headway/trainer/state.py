"""What training changes: a policy's weights, its optimizer, and how many steps they have come."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from headway.config.trainer import TrainSettings
from headway.models.checkpoint import load_config, load_model, read_tensors
from headway.models.config import ModelConfig
from headway.models.decoder import DecoderLM
from headway.models.registry import build_model
from headway.models.tiny import resolve_model
from headway.models.weights import load_hf_tensors
from headway.trainer.optimizers import PolicyOptimizer
from headway.trainer.parallel import ParallelPolicy, make_mesh, parallelize
from headway.trainer.policy import Policy
from headway.trainer.ranks import Ranks


@dataclass
class TrainState:
    """`step` is also the version of the weights. `bad_steps` were skipped in a row, up to now."""

    policy: Policy
    optimizer: PolicyOptimizer
    compute_dtype: torch.dtype
    folder: Path
    """The checkpoint folder that the weights and the tokenizer came from."""
    step: int = 0
    bad_steps: int = 0

    @property
    def model(self) -> DecoderLM:
        return self.policy.model

    @property
    def config(self) -> ModelConfig:
        return self.policy.model.config

    def trained(self) -> Iterator[tuple[str, Tensor]]:
        """The parameters that training changes: all, or the adapters alone."""
        return trained_parameters(self.model)


def trained_parameters(model: DecoderLM) -> Iterator[tuple[str, Tensor]]:
    return ((name, p) for name, p in model.named_parameters() if p.requires_grad)


def build_state(settings: TrainSettings, ranks: Ranks) -> TrainState:
    """The initial policy, laid out over the ranks, with a fresh optimizer."""
    trainer = settings.trainer
    folder = resolve_model(settings.model.path)
    dtype = compute_dtype(settings, ranks.device)
    mesh = make_mesh(ranks, trainer.replicas)
    plan = ParallelPolicy(dtype, trainer.activations, trainer.compile)
    policy = _load_policy(folder, settings, ranks, plan)
    parallelize(policy, mesh, plan)
    if policy.model.head_weight().is_meta:
        policy.to_empty(device=ranks.device)
        load_hf_tensors(policy.model, read_tensors(folder))
    policy.train()
    optimizer = PolicyOptimizer(trained_parameters(policy.model), trainer.optim, state_on_cpu=trainer.optimizer_on_cpu)
    return TrainState(policy, optimizer, dtype, folder)


def compute_dtype(settings: TrainSettings, device: torch.device) -> torch.dtype:
    if settings.model.dtype == "auto":
        return torch.bfloat16 if device.type == "cuda" else torch.float32
    return torch.bfloat16 if settings.model.dtype == "bfloat16" else torch.float32


def _load_policy(folder: Path, settings: TrainSettings, ranks: Ranks, plan: ParallelPolicy) -> Policy:
    """Where several ranks will share the weights, they are left unset: each rank then loads only its own part."""
    lora = settings.model.lora
    if lora is not None:
        model = _load_adapted(folder, settings, ranks.device, plan.compute_dtype)
    elif ranks.size > 1:
        model = build_model(load_config(folder), device="meta")
    else:
        model = load_model(folder, device=ranks.device)
    return Policy(model, settings.trainer.head_chunk, plan.activations.offload)


def _load_adapted(folder: Path, settings: TrainSettings, device: torch.device, dtype: torch.dtype) -> DecoderLM:
    """A frozen base in the precision of computation (nothing updates it), and float32 adapters."""
    from headway.models.lora import apply_lora

    assert settings.model.lora is not None
    model = load_model(folder, device=device, dtype=dtype)
    apply_lora(model, settings.model.lora, seed=settings.seed)
    for _, parameter in trained_parameters(model):
        parameter.data = parameter.data.float()
    return model
