"""A family from outside the package is trained, served and exported like those inside it."""

import asyncio
import json
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from models_common import perturb_norms, random_tokens, run_packed
from outside_family import SinkMoe, SinkMoeConfig

from headway.base.errors import UsageError
from headway.cli.main import run as run_command
from headway.config.inference import ServeSettings
from headway.core.protocol import GenerateRequest, SamplingParams
from headway.core.records import read_rollouts
from headway.core.runs import RunPaths
from headway.inference.embedded.load import load_service
from headway.models.build import build_model
from headway.models.checkpoints.folders import load_model, read_tensors, save_checkpoint
from headway.models.costs import StepFlops, active_parameter_count, kv_bytes_per_token, parameter_count
from headway.models.decoder import DecoderLM
from headway.models.registry import load_config, load_family, register_family
from headway.models.tiny import resolve_model
from headway.monitor.metrics import read_metrics
from headway.rendering.external import available

FAMILY = f"{Path(__file__).parent / 'outside_family.py'}:SinkMoe"
TEMPLATE = (
    "{% if messages[0].role != 'system' %}<|im_start|>system\n<|im_end|>\n{% endif %}"
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{% if m.role == 'assistant' %}<think></think>{% endif %}"
    "{{ m.content }}<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n<think>\n{% endif %}"
)
"""A template that the family's chat format renders, and ours do not: its prompts open the reasoning."""
SHAPE = SinkMoeConfig(
    "sink_moe", 0, 64, layers=3, heads=4, kv_heads=2, head_dim=16, mlp_width=64, rotary_dim=8, max_len=256,
    experts=4, experts_per_token=2, expert_width=24, normalize_gates=True,
)  # fmt: skip


@pytest.fixture(scope="module", autouse=True)
def registered() -> None:
    register_family(SinkMoe())


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint of the family, whose every part counts, with a tokenizer."""
    tiny = resolve_model("tiny")
    known = load_config(tiny)
    config = replace(SHAPE, vocab_size=known.vocab_size, eos_ids=known.eos_ids, pad_id=known.pad_id)
    model = perturb_norms(build_model(config))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("sinks"):
                parameter.fill_(1.0)
    path = tmp_path_factory.mktemp("model") / "sink-moe"
    save_checkpoint(model, path, files_from=tiny)
    tokenizer = path / "tokenizer_config.json"
    tokenizer.write_text(json.dumps(json.loads(tokenizer.read_text()) | {"chat_template": TEMPLATE}))
    return path


def test_a_window_sinks_partial_rotary_and_a_shared_expert_change_what_is_computed(folder: Path) -> None:
    model = load_model(folder)
    ids = random_tokens(model.config, [40])

    def hidden(changed: DecoderLM) -> torch.Tensor:
        with torch.no_grad():
            return run_packed(changed, ids, [40]).hidden_TD

    whole = hidden(model)
    for change in ({"window": 30}, {"rotary_dim": 16}):
        other = build_model(replace(model.config, **change), seed=None)
        other.load_state_dict(model.state_dict())
        assert (hidden(other) - whole).abs().max() > 1e-3, change
    for name in ("self_attn.sinks", "mlp.shared_experts.down_proj.weight", "mlp.gate.e_score_correction_bias"):
        other = load_model(folder)
        with torch.no_grad():
            other.get_parameter(f"model.layers.0.{name}").copy_(
                torch.arange(4.0) if "bias" in name else torch.tensor(0.0)
            )
        assert (hidden(other) - whole).abs().max() > 1e-3, name


def test_costs_are_those_of_the_model(folder: Path) -> None:
    config, model = load_config(folder), load_model(folder)
    assert parameter_count(config) == sum(p.numel() for p in model.parameters())
    experts = sum(p.numel() for p in model.layers.parameters() if p.ndim == 3)
    matrices = sum(p.numel() for p in model.layers.parameters() if p.ndim == 2)
    assert active_parameter_count(config) == matrices + experts // 2
    assert kv_bytes_per_token(config, 4) == 4 * 3 * 2 * 2 * 16
    full = replace(config, window=256)
    assert StepFlops(config).count([100], 0) < StepFlops(full).count([100], 0)
    assert StepFlops(config).count([8], 0) == StepFlops(full).count([8], 0)


def test_an_unknown_family_says_how_to_register_one(folder: Path, tmp_path: Path) -> None:
    hf = json.loads((folder / "config.json").read_text())
    assert hf["architectures"] == ["SinkMoeForCausalLM"]
    (tmp_path / "config.json").write_text(json.dumps(hf | {"model_type": "nobody_knows"}))
    with pytest.raises(UsageError, match=r"'nobody_knows'.*model\.family"):
        load_config(tmp_path)
    with pytest.raises(UsageError, match="not a subclass of"):
        load_family(FAMILY.replace("SinkMoe", "SinkMoeConfig"))


def test_families_configs_costs_and_chat_formats_are_known_without_torch(folder: Path) -> None:
    code = """
import sys
from headway.models.costs import parameter_count
from headway.models.registry import load_config
from headway.rendering.load import load_renderer
print(type(load_renderer(sys.argv[2], family=sys.argv[1])).__name__)
print(parameter_count(load_config(sys.argv[2])))
assert "torch" not in sys.modules
"""
    done = subprocess.run(
        [sys.executable, "-c", code, FAMILY, str(folder)], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    renderer = "ExternalRenderer" if available() else "TemplateRenderer"
    assert done.stdout.split() == [renderer, str(parameter_count(load_config(folder)))]


def test_it_is_trained_exported_and_served(folder: Path, tmp_path: Path) -> None:
    words = ["red", "green", "blue", "black", "white", "pink", "gray", "brown"]
    rows = [{"prompt": word, "completion": word[::-1]} for word in words * 6]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    flags: dict[str, Any] = {
        "model.path": folder,
        "model.family": FAMILY,
        "data.path": tmp_path / "rows.jsonl",
        "seq_len": 64,
        "batch_tokens": 300,
        "max_steps": 8,
        "trainer.optim.lr": 3e-3,
        "trainer.activations.checkpoint": "full",
        "placement.device": "cpu",
        "run.output_dir": tmp_path,
        "run.name": "run",
    }
    headway("sft", flags, tmp_path)
    paths = RunPaths(tmp_path / "run")
    losses = [line["loss"] for line in read_metrics(paths.metrics / "trainer.jsonl")]
    assert len(losses) == 8 and losses[-1] < 0.8 * losses[0]

    exported = paths.exports / "step_000008"
    trained = load_model(exported)
    assert load_config(exported) == load_config(folder)
    save_checkpoint(trained, tmp_path / "again", files_from=exported)
    first, second = dict(read_tensors(exported)), dict(read_tensors(tmp_path / "again"))
    assert first.keys() == second.keys() and "model.layers.0.mlp.experts.3.up_proj.weight" in first
    assert all(torch.equal(first[name], second[name]) for name in first)
    assert not torch.equal(
        first["model.layers.0.self_attn.sinks"], dict(read_tensors(folder))["model.layers.0.self_attn.sinks"]
    )

    prompt = random_tokens(trained.config, [30]).tolist()
    tokens, logprobs = asyncio.run(serve(exported, prompt, 40))
    with torch.no_grad():
        ids = torch.tensor([*prompt, *tokens])
        expected = torch.log_softmax(trained.logits(run_packed(trained, ids, [len(ids)]).hidden_TD), -1)
    expected_N = expected[len(prompt) - 1 : -1].gather(1, torch.tensor(tokens)[:, None])[:, 0]
    torch.testing.assert_close(torch.tensor(logprobs), expected_N, atol=1e-4, rtol=0)


def test_environments_speak_its_chat_format(folder: Path, tmp_path: Path) -> None:
    """A run from a folder where `model.family` is a relative path; its reply to an opened reasoning is reasoning."""
    pytest.importorskip("renderers", reason="an optional extra")
    shutil.copy(FAMILY.rpartition(":")[0], tmp_path / "mine.py")
    env = {"id": "reverse-text", "workers": {"max": 1}}
    flags = {
        "model.path": folder,
        "model.family": "mine.py:SinkMoe",
        "seq_len": 96,
        "max_steps": 2,
        "orchestrator.batch_size": 4,
        "orchestrator.group_size": 2,
        "orchestrator.filters.zero_advantage": "false",
        "orchestrator.sampling.max_tokens": 6,
        "orchestrator.envs": json.dumps([env]),
        "placement.device": "cpu",
        "run.output_dir": "outputs",
        "run.name": "run",
    }
    headway("rl", flags, tmp_path)
    paths = RunPaths(tmp_path / "outputs" / "run")
    replies = [
        node.message
        for step in (1, 2)
        for record in read_rollouts(paths, step)
        for node in record.episode.traces[0].nodes
        if node.message and node.message.role == "assistant"
    ]
    # A random model may close the reasoning at once, but hardly in every other reply.
    assert len(replies) == 8 and sum(bool(reply.reasoning) for reply in replies) > 4
    for name in ("rl", "trainer", "orchestrator", "inference"):
        text = (paths.config / f"{name}.toml").read_text()
        assert f'family = "{tmp_path / "mine.py"}:SinkMoe"' in text, text


def test_eval_and_env_register_it(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = ("--url", "http://127.0.0.1:9", "--model", str(folder), "--family", "nowhere.py:SinkMoe")
    for command in (("eval", "--api", "chat", "--env", "reverse-text"), ("env", "try", "reverse-text")):
        assert run_command([*command, *model]) == (3 if command[0] == "eval" else 2)
        assert 'model.family "nowhere.py:SinkMoe" could not be imported: there is no file' in capsys.readouterr().err


def headway(command: str, flags: dict[str, Any], cwd: Path) -> None:
    argv = [part for name, value in flags.items() for part in (f"--{name}", str(value))]
    line = [sys.executable, "-m", "headway.cli.main", command, *argv]
    done = subprocess.run(line, cwd=cwd, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-3000:]


async def serve(folder: Path, prompt: list[int], count: int) -> tuple[list[int], list[float]]:
    """Greedy tokens of the embedded engine, far beyond the window, and their logprobs."""
    settings = ServeSettings.model_validate({"placement": {"device": "cpu"}, "seq_len": 128})
    params = SamplingParams(max_tokens=count, temperature=0.0, ignore_eos=True)
    service = load_service(settings, folder)
    await service.start()
    try:
        fresh, cached = [await service.generate(GenerateRequest(prompt, sampling_params=params)) for _ in range(2)]
    finally:
        await service.close()
    assert cached.cached_tokens > 0 and cached.choices[0].token_ids == fresh.choices[0].token_ids
    return fresh.choices[0].token_ids, fresh.choices[0].logprobs
