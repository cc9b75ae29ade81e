"""The training state: a policy's weights, its optimizer, and the number of steps they have been trained."""

import logging
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn

from headway.base.devices import resolve_dtype
from headway.config.shared import LoraSettings
from headway.config.trainer import TrainSettings
from headway.models.adapters.adaptable import adapters_of
from headway.models.adapters.lora import apply_lora, init_adapters
from headway.models.build import build_model
from headway.models.checkpoints.folders import read_tensors
from headway.models.checkpoints.tensors import load_hf_tensors
from headway.models.configs.config import ModelConfig
from headway.models.decoder import DecoderLM
from headway.models.fp8 import apply_fp8, quantize_weights
from headway.models.ops.linear import tune_matmul
from headway.models.registry import load_config
from headway.models.tiny import resolve_model
from headway.models.vision.training import prepare_tower
from headway.trainer.balance import ExpertBalance
from headway.trainer.memory.copies import make_copies
from headway.trainer.memory.recompute import recompute_policy
from headway.trainer.optimizers.optimizer import PolicyOptimizer
from headway.trainer.parallel.ranks import Ranks
from headway.trainer.parallel.sharding import fill
from headway.trainer.parallelize import parallelize
from headway.trainer.policy import Policy
from headway.transport.weights.fingerprint import dtype_name

logger = logging.getLogger(__name__)


@dataclass
class TrainState:
    """One rank's state. `step` is also the version of the weights; the last `bad_steps` steps were skipped."""

    policy: Policy
    optimizer: PolicyOptimizer
    balance: ExpertBalance
    compute_dtype: torch.dtype
    folder: Path
    """The checkpoint folder that the weights and the tokenizer came from."""
    lora: LoraSettings | None = None
    """Settings of the adapter, if one is trained instead of all weights."""
    step: int = 0
    bad_steps: int = 0

    @property
    def model(self) -> DecoderLM:
        return self.policy.model

    @property
    def config(self) -> ModelConfig:
        return self.policy.model.config

    def trained(self) -> Iterator[tuple[str, Tensor]]:
        """Yield the parameters that training changes: all, or the adapters alone."""
        return trained_parameters(self.model)


def trained_parameters(model: DecoderLM) -> Iterator[tuple[str, Tensor]]:
    return ((name, p) for name, p in model.named_parameters() if p.requires_grad)


def build_state(settings: TrainSettings, ranks: Ranks) -> TrainState:
    """Load the policy of the settings' checkpoint folder, sharded over the ranks, with a fresh optimizer."""
    folder = resolve_model(settings.model.path, settings.model.family)
    config = load_config(folder, settings.model.implementation)
    return make_state(settings, ranks, folder, config, lambda m: load_hf_tensors(m, read_tensors(folder)))


def make_state(
    settings: TrainSettings, ranks: Ranks, folder: Path, config: ModelConfig, set_weights: Callable[[DecoderLM], None]
) -> TrainState:
    """Build a policy whose weights `set_weights` sets once it is sharded: no rank ever holds more than its part."""
    trainer, lora = settings.trainer, settings.model.lora
    dtype: torch.dtype = getattr(torch, resolve_dtype(settings.model.dtype, ranks.device.type))
    # float32 master weights; under an adapter the base is frozen, so it needs no more than the computation's precision.
    model = build_model(
        config,
        device="meta",
        dtype=torch.float32 if lora is None else dtype,
        compute_dtype=dtype,
        recompute=recompute_policy(trainer.activations, config.layers),
    )
    prepare_tower(model, settings.model.vision_tower, ranks.size)
    fp8 = settings.model.compute == "fp8"
    if fp8:
        apply_fp8(model)
    if ranks.is_main:
        logger.info("training linear layers in %s", "FP8 with block scales" if fp8 else dtype_name(dtype))
    adapters = {} if lora is None else _add_adapters(model, lora, settings.seed)
    copies = make_copies(ranks.device)
    policy = Policy(
        model,
        trainer.head_chunk,
        copies if trainer.activations.offload else None,
        entropy_gradient=trainer.entropy_coef > 0,
    )
    compile_mlps = trainer.compile and not fp8 and trainer.activations.checkpoint == "off"
    parallelize(policy, ranks, dtype, compile_mlps=compile_mlps, exchange=trainer.experts.exchange)
    policy.to_empty(device=ranks.device)
    if ranks.device.type == "cpu":
        tune_matmul(config.width)
    set_weights(model)
    if fp8 and lora is not None and ranks.size == 1:
        # Sharded weights are gathered in the precision of computation, and quantized then.
        quantize_weights(model, dtype)
    for name, parameter in trained_parameters(model):
        if name in adapters:
            fill(parameter, adapters[name])
    policy.train()
    offload = copies if trainer.optimizer_on_cpu else None
    optimizer = PolicyOptimizer(trained_parameters(model), trainer.optim, offload=offload)
    return TrainState(policy, optimizer, ExpertBalance(trainer.experts, model), dtype, folder, lora)


def _add_adapters(model: DecoderLM, lora: LoraSettings, seed: int) -> dict[str, Tensor]:
    """Give an unset model its float32 adapters. Returns their first values, which sharding would lose."""
    apply_lora(model, lora)
    for weight, a, b in adapters_of(model):
        weight.hold(*(nn.Parameter(torch.empty(p.shape, dtype=torch.float32)) for p in (a, b)))
    init_adapters(model, seed)
    return {name: parameter.detach() for name, parameter in trained_parameters(model)}
