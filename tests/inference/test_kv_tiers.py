"""Host memory and files under the KV cache: fewer tokens are computed twice, and logprobs stay what they are."""

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from engine_common import LLAMA, MOE, QWEN3, make_engine, make_model, mismatch, prompt, request, run_all
from pydantic import ValidationError

from headway.base.errors import UsageError
from headway.config.inference import InferenceSettings, ServeSettings
from headway.core.prefixes import PrefixSummary
from headway.inference.embedded.cache.block_files import BlockFiles
from headway.inference.embedded.cache.host_tier import HostTier
from headway.inference.embedded.engine import EmbeddedEngine
from headway.inference.outputs import Result
from headway.models.decoder import DecoderLM

TOLERANCE = 1e-5
CONVERSATIONS, TURNS = 9, 3


def tiered(model: DecoderLM, host: int, files: BlockFiles | None = None, **limits: Any) -> EmbeddedEngine:
    """An engine whose own cache holds one conversation or two."""
    engine = make_engine(model, num_blocks=40, max_running=2, **limits)
    engine.roots.fingerprint = "weights"
    engine.add_host_tier(host, files)
    return engine


def converse(engine: EmbeddedEngine, salt: str | None = None) -> tuple[int, list[tuple[list[int], Result]]]:
    """Play conversations turn by turn, one after the other; return the tokens prefilled, and prompts with replies."""
    histories = [prompt(20, seed=i) for i in range(CONVERSATIONS)]
    prefilled, said = 0, []
    for turn in range(TURNS):
        for i, history in enumerate(histories):
            asked = request(history, 6, temperature=0.0, ignore_eos=True, cache_salt=salt)
            (result,) = run_all(engine, [asked])
            prefilled += len(history) - result.cached_tokens
            said.append((history, result))
            histories[i] = history + result.choices[0].token_ids + prompt(4, seed=100 * turn + i)
    return prefilled, said


@pytest.mark.parametrize("config", [QWEN3, LLAMA, MOE], ids=lambda config: config.family)
def test_host_memory_saves_prefill_and_changes_no_logprob(config: Any) -> None:
    model = make_model(config)
    alone, expected = converse(tiered(model, 0))
    saved, found = converse(tiered(model, 400))
    assert saved < alone / 2
    for (tokens, before), (same, after) in zip(expected, found, strict=True):
        assert tokens == same and mismatch(model, tokens, after.choices[0]) < TOLERANCE
        assert before.choices[0].token_ids == after.choices[0].token_ids
        if config.experts:
            assert (before.choices[0].experts == after.choices[0].experts).all()


def test_a_small_tier_is_bounded_and_right() -> None:
    model = make_model()
    engine = tiered(model, 30)
    _, said = converse(engine)
    assert isinstance(engine.cache.tier, HostTier) and len(engine.cache.tier) <= 30
    for tokens, result in said:
        assert mismatch(model, tokens, result.choices[0]) < TOLERANCE


def test_new_weights_empty_the_tier_and_salts_do_not_meet() -> None:
    model = make_model()
    engine = tiered(model, 400)
    converse(engine, salt="one")
    assert isinstance(engine.cache.tier, HostTier) and len(engine.cache.tier) > 0
    (other,) = run_all(engine, [request(prompt(20, seed=0), 2, cache_salt="two")])
    assert other.cached_tokens == 0
    engine.weights_changed(1, "others")
    assert len(engine.cache.tier) == 0
    (after,) = run_all(engine, [request(prompt(20, seed=0), 2, cache_salt="one")])
    assert after.cached_tokens == 0


def test_kv_of_two_versions_is_nobody_elses(tmp_path: Path) -> None:
    """Blocks of a sequence that goes on under new weights are not kept for those who start later, even where files hold
    the blocks before them and the weights return to what they were."""
    model, files = make_model(), BlockFiles(tmp_path, 10**8)
    before = tiered(model, 20, files)
    run_all(before, [request(prompt(20), 8, temperature=0.0, ignore_eos=True)])
    converse(before)
    engine = tiered(model, 20, files)
    engine.add(request(prompt(20), 40, temperature=0.0, ignore_eos=True), "long")
    for _ in range(8):
        engine.step()
    engine.weights_changed(1, "others")
    said: list[Any] = []
    while engine.active:
        said += engine.step()
    (result,) = [item for _, item in said if isinstance(item, Result)]
    converse(engine)
    engine.weights_changed(2, "weights")
    whole = prompt(20) + result.choices[0].token_ids
    (again,) = run_all(engine, [request(whole, 2)])
    assert 16 <= again.cached_tokens <= 28


def test_engines_share_a_store_of_files_and_go_on_without(tmp_path: Path) -> None:
    model = make_model(MOE)
    first, expected = converse(tiered(model, 20, BlockFiles(tmp_path, 10**8, "secret")))
    engine = tiered(model, 20, BlockFiles(tmp_path, 10**8, "secret"))
    second, found = converse(engine)
    assert second < first / 2
    # The store vanishes under an engine that uses it, and cannot be made again: that costs speed only.
    shutil.rmtree(tmp_path)
    tmp_path.write_text("not a folder")
    third, without = converse(engine)
    assert third > second
    for (tokens, before), (_, after), (_, last) in zip(expected, found, without, strict=True):
        assert before.choices[0].token_ids == after.choices[0].token_ids == last.choices[0].token_ids
        assert max(mismatch(model, tokens, reply.choices[0]) for reply in (after, last)) < TOLERANCE


def test_forged_and_damaged_files_cost_speed_only(tmp_path: Path) -> None:
    model = make_model()
    converse(tiered(model, 20, BlockFiles(tmp_path, 10**8, "secret")))
    files = sorted(tmp_path.glob("*/*.kv"))
    # Content of one block under the name of another, a flipped byte, a file cut short: and all of a stranger's.
    files[0].write_bytes(files[1].read_bytes())
    for path in files[1::2]:
        data = bytearray(path.read_bytes())
        data[-1] ^= 1
        path.write_bytes(data)
    files[2].write_bytes(b"short")
    _, found = converse(tiered(model, 20, BlockFiles(tmp_path, 10**8, "secret")))
    for tokens, result in found:
        assert mismatch(model, tokens, result.choices[0]) < TOLERANCE
    stranger = BlockFiles(tmp_path, 10**8, "another secret")
    size = files[4].stat().st_size - 32
    assert stranger.read(bytes.fromhex(files[4].stem), size) is None
    assert BlockFiles(tmp_path, 10**8, "secret").read(bytes.fromhex(files[4].stem), size) is not None


def test_the_store_is_bounded_and_may_vanish(tmp_path: Path) -> None:
    folder = tmp_path / "store"
    files = BlockFiles(folder, 3000)
    for i in range(200):
        files.write(i.to_bytes(16), torch.full((100,), i, dtype=torch.uint8))
    # It is looked at every 64 writes.
    assert sum(path.stat().st_size for path in folder.glob("*/*.kv")) <= 3000 + 64 * 132
    for path in folder.glob("*/*.kv"):
        path.unlink()
    assert files.read((199).to_bytes(16), 100) is None
    blocked = tmp_path / "file"
    blocked.write_text("not a folder")
    BlockFiles(blocked, 3000).write(bytes(16), torch.zeros(4, dtype=torch.uint8))


def test_settings_that_do_not_fit_are_refused(tmp_path: Path) -> None:
    from headway.inference.vllm.arguments import _check_tiers

    with pytest.raises(ValidationError, match="kv_host_memory_gb"):
        InferenceSettings(kv_store="somewhere")
    settings = ServeSettings(inference=InferenceSettings(kv_host_memory_gb=1.0)).inference
    with pytest.raises(UsageError, match="GPUs only"):
        _check_tiers(settings, "cpu")


def test_a_server_reports_the_prefixes_it_has() -> None:
    model = make_model()
    engine = tiered(model, 400)
    converse(engine)
    summary = PrefixSummary.of(engine.cache.names, engine.cache.block_size, {"policy": engine.root_of(None, None)})
    assert summary.count_cached(prompt(20, seed=0), "policy") >= 16
    engine.weights_changed(1, "others")
    after = PrefixSummary.of(engine.cache.names, engine.cache.block_size, {"policy": engine.root_of(None, None)})
    assert after.count_cached(prompt(20, seed=0), "policy") == 0
