"""Every family computes what transformers computes, in the trainer and in the engine.

A case is a small config.json of transformers in the folder of its family, `FAMILY/CASE.json`: adding one adds no code.
Those in the folder `transformers` are of other families, and run by Hugging Face's own modules. `images` in a case of a
model that sees are the grids of images by the number of the sample that shows them.
"""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from engine_case import EngineCase, mismatch, same_experts
from family_case import (
    CASES,
    HERE,
    FamilyCase,
    gradients,
    hf_gradients,
    hf_logits,
    load_hf_model,
    make_hf_model,
    packed_logits,
    run_packed,
)
from torch import Tensor

from headway.base.errors import UsageError
from headway.config.shared import LoraSettings
from headway.models.adapters.adaptable import adapters_of
from headway.models.adapters.lora import apply_lora, merge_adapter
from headway.models.checkpoints.folders import load_model, read_tensors, save_checkpoint
from headway.models.configs.config import ModelConfig
from headway.models.costs import active_parameter_count, adapter_count, block_shapes, parameter_count
from headway.models.decoder import DecoderLM
from headway.models.family import IGNORED_KEYS
from headway.models.layers.experts import Experts
from headway.models.ops import registry
from headway.models.registry import config_from_hf, families

LENGTHS = [9, 1, 37, 4]
"""Odd ones, one longer than any window in a config."""
ENGINE_TOLERANCE = 1e-5


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> Iterator[None]:
    """Models this small wait for threads longer than these compute."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="class", params=CASES)
def case(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> FamilyCase:
    return FamilyCase(request.param, tmp_path_factory.mktemp("family") / "theirs")


@pytest.fixture(scope="class")
def served(case: FamilyCase) -> Iterator[EngineCase]:
    registry.disable("c")
    yield EngineCase(case)


def test_every_family_has_cases() -> None:
    own = {f.model_type for f in families() if type(f).__module__.startswith("headway.")}
    assert own | {"transformers"} == {case.partition("/")[0] for case in CASES}


@pytest.mark.parametrize("name", ["qwen3_5_text/plain", "qwen3_next/plain"])
def test_delta_nets_with_the_epsilon_of_released_models_are_as_exact_as_transformers(name: str, tmp_path: Path) -> None:
    """The outputs of these heads are so small (0.005) that the norm behind them enlarges float32's rounding hundreds of
    times: transformers itself is off by 2e-5 to 5e-5. The cases have a larger epsilon, for bars as tight as others'."""
    values = json.loads((HERE / f"{name}.json").read_text()) | {"rms_norm_eps": 1e-6}
    torch.manual_seed(0)  # how far rounding is enlarged depends on the weights that are drawn
    theirs = make_hf_model(values)
    theirs.save_pretrained(tmp_path)
    ours = load_model(tmp_path)
    ids = torch.randint(0, values["vocab_size"], (sum(LENGTHS),), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        found, expected = packed_logits(ours, ids, LENGTHS), hf_logits(theirs, ids, LENGTHS)
        exact = hf_logits(theirs.double(), ids, LENGTHS)
    assert float((found - expected).abs().max()) < 1e-4
    assert float((found - exact).abs().max()) < 3 * float((expected - exact).abs().max())


class TestFamily:
    def test_the_folder_is_that_of_its_family(self, case: FamilyCase) -> None:
        assert case.config.family == case.name.partition("/")[0]

    def test_a_changed_config_value_counts_or_is_refused(self, case: FamilyCase) -> None:
        """Nothing in config.json is ignored, except what its family says does not matter."""
        if not case.own:
            pytest.skip("transformers reads config.json, not Headway")
        hf = json.loads((case.folder / "config.json").read_text())
        with pytest.raises(UsageError, match="attention_fantasy"):
            config_from_hf({**hf, "attention_fantasy": 3})
        config_from_hf({**hf, "attention_fantasy": None})
        for key, value in hf.items():
            if value is not None and key not in IGNORED_KEYS and key not in case.family.hf_ignored:
                assert any(counts(hf, key, other) for other in others(value)), key

    def test_packed_logits_equal_transformers(self, case: FamilyCase) -> None:
        ids, images = case.samples(LENGTHS)
        with torch.no_grad():
            theirs = hf_logits(case.hf, ids, LENGTHS, images)
            ours = packed_logits(case.model, ids, LENGTHS, **case.extra(images, LENGTHS))
        assert ours.dtype == torch.float32 and theirs.std() > 0.1
        torch.testing.assert_close(ours, theirs, atol=1e-4, rtol=0)

    def test_gradients_equal_transformers(self, case: FamilyCase, tmp_path: Path) -> None:
        model = case.fresh()
        backward(model, case)
        (ids, images), weights = case.samples(LENGTHS), loss_weights(case)
        (hf_logits(case.hf, ids, LENGTHS, images) * weights).sum().backward()
        check_gradients(gradients(model), hf_gradients(case.hf, tmp_path / "grads"))

    def test_the_trainer_computes_with_the_weights_that_it_sends(self, case: FamilyCase) -> None:
        """It keeps them in float32: rounding them as they are sent changes no bit of what it computes in bfloat16."""
        if not case.own:
            pytest.skip("Hugging Face's own modules compute under autocast, their norms with weights in float32")
        model = case.fresh()
        model.compute_in(torch.bfloat16)
        ids, images = case.samples(LENGTHS)
        with torch.no_grad():
            kept = packed_logits(model, ids, LENGTHS, **case.extra(images, LENGTHS))
            for module in model.modules():
                for name, parameter in module.named_parameters(recurse=False):
                    if name not in getattr(module, "float32_parameters", ()):
                        parameter.copy_(parameter.bfloat16())
            sent = packed_logits(model, ids, LENGTHS, **case.extra(images, LENGTHS))
        assert torch.equal(kept, sent)

    @pytest.mark.parametrize("checkpoint", ["selective", "full"])
    def test_recomputing_activations_changes_no_gradient(self, case: FamilyCase, checkpoint: str) -> None:
        kept, recomputed = case.fresh(), case.recomputed(checkpoint)
        backward(kept, case)
        backward(recomputed, case)
        check_gradients(gradients(recomputed), gradients(kept))

    def test_checkpoints_survive_to_the_byte_and_load_in_transformers(self, case: FamilyCase, tmp_path: Path) -> None:
        save_checkpoint(case.model, tmp_path / "ours")
        save_checkpoint(case.load(tmp_path / "ours"), tmp_path / "again")
        theirs, ours, again = (contents(folder) for folder in (case.folder, tmp_path / "ours", tmp_path / "again"))
        assert ours == theirs and again == ours
        assert (tmp_path / "ours" / "config.json").read_bytes() == (tmp_path / "again" / "config.json").read_bytes()
        loaded, report = load_hf_model(tmp_path / "ours")
        assert not any(report[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys")), report
        ids, images = case.samples(LENGTHS)
        with torch.no_grad():
            theirs = hf_logits(case.hf, ids, LENGTHS, images)
            torch.testing.assert_close(hf_logits(loaded, ids, LENGTHS, images), theirs)

    def test_costs_are_those_of_the_model(self, case: FamilyCase) -> None:
        assert parameter_count(case.config) == sum(p.numel() for p in case.model.parameters())
        named = list(case.model.layers.named_parameters())
        experts = sum(p.numel() for name, p in named if ".experts." in name and p.ndim == 3)
        always = sum(p.numel() for name, p in named if ".experts." not in name and p.ndim > 1)
        per_token, of = case.config.experts_per_token, case.config.experts
        if experts and not case.own:  # whose experts are not Headway's to route
            per_token, of = case.config.hf["num_experts_per_tok"], case.config.hf["num_local_experts"]
        used = experts * per_token // of if of else 0
        assert active_parameter_count(case.config) == always + used

    def test_an_adapter_on_all_linear_layers_merges_to_the_same_logits(self, case: FamilyCase) -> None:
        model, ids = case.fresh(), case.tokens(LENGTHS)
        with torch.no_grad():
            before = packed_logits(model, ids, LENGTHS)
            targets = sorted({name for shape in block_shapes(case.config) for name in shape.linears})
            targets += ["experts"] if any(isinstance(module, Experts) for module in model.modules()) else []
            lora = LoraSettings(rank=3, targets=targets)
            apply_lora(model, lora)
            pairs = [(a, b) for _, a, b in adapters_of(model)]
            assert adapter_count(case.config, lora) == sum(a.numel() + b.numel() for a, b in pairs)
            draw = torch.Generator().manual_seed(5)
            for _, b in pairs:
                b.normal_(0.0, 0.02, generator=draw)
            adapted = packed_logits(model, ids, LENGTHS)
            merge_adapter(model)
            merged = packed_logits(model, ids, LENGTHS)
        assert (adapted - before).abs().max() > 1e-2
        torch.testing.assert_close(merged, adapted, atol=1e-4, rtol=0)

    def test_replayed_routing_gives_the_same_logits(self, case: FamilyCase) -> None:
        if not case.config.experts:
            pytest.skip("a dense model")
        ids = case.tokens(LENGTHS)
        with torch.no_grad():
            free = run_packed(case.model, ids, LENGTHS)
            assert free.routed_experts_TLk is not None and free.expert_load_LE is not None
            given = free.routed_experts_TLk.to(torch.int16)
            replayed = run_packed(case.model, ids, LENGTHS, routed_experts_TLk=given)
            other = (given + 1) % case.config.experts
            changed = run_packed(case.model, ids, LENGTHS, routed_experts_TLk=other.where(given >= 0, given))
        assert torch.equal(free.hidden_TD, replayed.hidden_TD)
        assert not torch.equal(free.hidden_TD, changed.hidden_TD)

    @pytest.mark.parametrize("kernels", ["plain", "compiled"])
    def test_the_engine_computes_what_the_trainer_computes(
        self, case: FamilyCase, served: EngineCase, kernels: str
    ) -> None:
        """Prompts in chunks beside decoding, past every window; preempted sequences; prefixes from the cache."""
        if kernels == "compiled":
            assert registry.enable("c"), "these tests need a C compiler"
        try:
            # Longer by one with compiled kernels: what the cache holds of the same prompts was computed without.
            prompts = [served.prompt(n + (kernels == "compiled")) for n in (1, 4, 19, 33, 45, 26)]
            before = served.engine.scheduler.preemptions
            results = served.generate(prompts, 24)
            assert served.engine.scheduler.preemptions > before
            assert mismatch(served.model, prompts, results) < ENGINE_TOLERANCE
            prompts = [[*prompts[-1][:-1], token] for token in range(3)]
            results = served.generate(prompts, 6)
            assert all(result.cached_tokens > 0 for result in results)
            assert mismatch(served.model, prompts, results) < ENGINE_TOLERANCE
        finally:
            registry.disable("c")

    def test_the_engine_routes_as_the_trainer_does(self, case: FamilyCase, served: EngineCase) -> None:
        if not case.config.experts:
            pytest.skip("a dense model")
        prompt = served.prompt(21)
        choice = served.generate([prompt], 9)[0].choices[0]
        assert same_experts(served.model, prompt + choice.token_ids, choice)

    def test_greedy_output_does_not_depend_on_the_batch(self, case: FamilyCase, served: EngineCase) -> None:
        alone = served.generate([served.prompt(23)], 16, temperature=0.0)[0].choices[0].token_ids
        crowd = [served.add(served.prompt(n, seed=1), 16) for n in (3, 30, 11)]
        name = served.add(served.prompt(23), 16, temperature=0.0)
        crowd += [served.add(served.prompt(n, seed=2), 16) for n in (40, 7)]
        results = served.finish()
        assert len(crowd) == 5 and results[name].choices[0].token_ids == alone

    def test_weights_are_updated_between_two_steps(self, case: FamilyCase, served: EngineCase) -> None:
        """Tokens before the update are the old weights'; a later request sees none of them, nor the cache."""
        old, prompt = case.fresh(), served.prompt(20, seed=3)
        name, version = served.add(prompt, 20), served.engine.version + 1
        for _ in range(8):
            served.engine.step()
        served.update(version)
        result = served.finish()[name]
        choice = result.choices[0]
        (first, count), (second, rest) = choice.versions
        assert (first, second) == (version - 1, version) and count + rest == 20 and count > 2
        choice.token_ids, choice.logprobs = choice.token_ids[:count], choice.logprobs[:count]
        if choice.experts is not None:
            choice.experts = choice.experts[: len(prompt) + count - 1]
        assert mismatch(old, [prompt], [result]) < ENGINE_TOLERANCE
        again = served.generate([prompt], 10)
        assert again[0].cached_tokens == 0
        assert mismatch(served.model, [prompt], again) < ENGINE_TOLERANCE
        assert mismatch(old, [prompt], again) > 1e-3


def counts(hf: dict[str, Any], key: str, value: Any) -> bool:
    """Tell if a value of config.json changes our config, or is refused by name. Where a list of layers or rotary
    parameters say the same, these go before."""
    windows = {"use_sliding_window": True, "sliding_window": 7} if "use_sliding_window" in hf else {}
    unlisted = {"layer_types": None, "mlp_layer_types": None, **windows}
    unrotated = {"rope_parameters": None, "partial_rotary_factor": None}
    bases = [{**hf, **less} for less in ({}, unlisted, unrotated)]
    return any(read({**base, key: value}) != before for base in bases if (before := read(base)) is not None)


def read(hf: dict[str, Any]) -> ModelConfig | None:
    """Our config, or None where it is refused."""
    try:
        return config_from_hf(hf)
    except UsageError:
        return None


def others(value: Any) -> Iterator[Any]:
    """Values of the same type."""
    if isinstance(value, bool):
        yield not value
    elif isinstance(value, int | float):
        yield from (value + 1, value * 2 + 2, 0)
    elif isinstance(value, str):
        yield value + "x"
    elif isinstance(value, list):
        yield [*value, *value, 1]
        yield value[:-1]
    elif isinstance(value, dict):
        yield {**value, "attention_fantasy": 3}
        for name, part in value.items():
            yield from ({**value, name: other} for other in others(part))


def loss_weights(case: FamilyCase) -> Tensor:
    draw = torch.Generator().manual_seed(3)
    return torch.randn(sum(LENGTHS), case.config.vocab_size, generator=draw)


def backward(model: DecoderLM, case: FamilyCase) -> None:
    ids, images = case.samples(LENGTHS)
    (packed_logits(model, ids, LENGTHS, **case.extra(images, LENGTHS)) * loss_weights(case)).sum().backward()


def check_gradients(ours: dict[str, Tensor], theirs: dict[str, Tensor]) -> None:
    """Equal within 1e-4 of each tensor's norm, besides rounding: a gradient may be nothing else."""
    assert ours.keys() == theirs.keys()
    rounding = 1e-6 * torch.stack([grad.norm() for grad in theirs.values()]).max()
    for name, grad in theirs.items():
        assert (ours[name] - grad).norm() <= 1e-4 * grad.norm() + rounding, name


def contents(folder: Path) -> dict[str, tuple[torch.dtype, bytes]]:
    return {
        name: (tensor.dtype, tensor.contiguous().view(torch.uint8).numpy().tobytes())
        for name, tensor in read_tensors(folder)
    }
