"""Supervised runs as tenants of a host: the bits of a run by itself, beside others and after kills."""

import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from test_tenant_host import JOIN, LiveHost, own_settings, steps_of, torch_load, train_by_hand, when
from test_tenants import alone, batches_of, same

from headway.base.errors import HeadwayError, UsageError
from headway.config.loader import load_settings
from headway.config.sft import SftSettings
from headway.core.batches import MicroBatch
from headway.core.runs import RunPaths
from headway.core.wire import encode
from headway.envs.bundled import grid
from headway.models.adapters.peft import read_adapter
from headway.monitor.metrics import read_metrics
from headway.trainer.recorder import Recorder
from headway.trainer.sft import sft
from headway.trainer.tenants.passes import TenantBlock
from headway.trainer.tenants.sft import sft_at_host
from headway.transport.control.tokens import write_token
from headway.transport.http_client import AnswerError
from headway.transport.rollouts import RankBatch
from headway.transport.tenants.tenancy import Tenancy

WORDS = ["red", "green", "blue", "black", "white", "pink", "gray", "brown"]
RECORDED = ("step", "loss", "grad_norm", "lr", "tokens", "epoch", "rows", "validation/loss")


@pytest.fixture
def host(tmp_path: Path) -> Iterator[LiveHost]:
    host = LiveHost(tmp_path / "tenants")
    yield host
    host.kill()


def sft_settings(folder: Path) -> SftSettings:
    """A short LoRA run with held-out rows, whose data is in `folder`."""
    for name, words in (("rows", WORDS), ("held_out", WORDS[:3])):
        rows = [{"prompt": word, "completion": word[::-1]} for word in words * 4]
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    flags: dict[str, Any] = {
        "model.path": "tiny",
        "model.lora.rank": 4,
        "data.path": folder / "rows.jsonl",
        "data.validation_path": folder / "held_out.jsonl",
        "validation_interval": 2,
        "max_steps": 6,
        "seq_len": 60,
        "batch_tokens": 200,
        "trainer.optim.lr": 5e-3,
        "placement.device": "cpu",
        "trainer.checkpoints.interval": 2,
    }
    argv = [part for name, value in flags.items() for part in (f"--{name}", str(value))]
    return load_settings(SftSettings, argv).settings


def lines(paths: RunPaths) -> list[dict[str, float]]:
    found = read_metrics(paths.metrics / "trainer.jsonl")
    return [{name: line[name] for name in RECORDED if name in line} for line in found]


def test_a_supervised_tenant_that_is_killed_ends_with_the_bits_of_a_run_by_itself(
    host: LiveHost, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings, by_itself, paths = sft_settings(tmp_path), RunPaths(tmp_path / "alone"), RunPaths(tmp_path / "dora")
    write_token(paths)
    merged = sft(settings, by_itself)
    _, expected = read_adapter(merged.with_name(f"{merged.name}_adapter"))
    tenancy, record = Tenancy(host.url, "dora", JOIN), Recorder.record
    beside = ThreadPoolExecutor(1).submit(train_by_hand, host.join("ben", own_settings("ben")), batches_of("ben"))

    def die_at_four(self: Recorder, step: int, *rest: Any) -> None:
        if step == 4:
            raise RuntimeError("killed")
        record(self, step, *rest)

    monkeypatch.setattr(Recorder, "record", die_at_four)
    with pytest.raises(RuntimeError, match="killed"):
        sft_at_host(settings, paths, tenancy)
    monkeypatch.setattr(Recorder, "record", record)
    assert paths.complete_checkpoints() == [2]
    killer = when(lambda: steps_of(paths)[-1:] == [5], lambda: (host.kill(), host.start()))  # type: ignore[arg-type]
    assert sft_at_host(settings, paths, tenancy)
    killer.join()
    assert same(read_adapter(paths.exports / "step_000006_adapter")[1], expected)
    assert lines(paths) == lines(by_itself)
    assert [line["step"] for line in lines(paths) if "validation/loss" in line] == [2, 4, 6]
    assert same(beside.result(), alone(own_settings("ben"), batches_of("ben"))[0])


def test_images_are_refused_in_rows_and_in_batches(tmp_path: Path) -> None:
    settings = sft_settings(tmp_path)
    settings = settings.model_copy(update={"model": settings.model.model_copy(update={"path": "tiny-vl"})})
    drawn = grid.demonstrations(2, questions=["color"], cell=8)
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in drawn))
    paths = RunPaths(tmp_path / "run")
    with pytest.raises(UsageError, match=r"rows\.jsonl: tenants cannot train on images yet; run it without --host"):
        sft_at_host(settings, paths, cast(Tenancy, None))
    micro = cast(MicroBatch, SimpleNamespace(images=object()))
    with pytest.raises(HeadwayError, match="tenants cannot train on images yet"):
        TenantBlock.make(cast(Any, None), cast(Any, None), micro, cast(Any, None), torch.device("cpu"))


def test_an_evaluation_changes_nothing_and_is_of_the_last_step(host: LiveHost) -> None:
    expected, _ = alone(own_settings("ben"), batches_of("ben"))
    client = host.join("ben", own_settings("ben"))
    for batch in batches_of("ben"):
        client.submit(encode(batch))
        while client.outcome(batch.step) is None:
            pass
        held_out = RankBatch(batch.step, batch.micro_batches, batch.counts)
        for _ in range(2):  # an answer may have been lost
            client.evaluate(encode(held_out))
        while (outcome := client.evaluation(batch.step)) is None:
            pass
        assert outcome.error is None and "grad_norm" not in outcome.metrics
    with pytest.raises(AnswerError, match="the step that can be evaluated is 3"):
        client.evaluate(encode(RankBatch(7, held_out.micro_batches, held_out.counts)))
    assert same(torch_load(client.adapter(3)), expected)
    assert host.tenant("ben").steps == 3
