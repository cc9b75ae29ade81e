"""Weights over HTTP and rollouts over CURVE: whole for those who know the run's token, nothing for others."""

from pathlib import Path

import pytest
import torch

from headway.base.errors import HeadwayError, UsageError
from headway.config.shared import HttpWeights, ZmqRollouts
from headway.core.batches import Batch, ComponentCounts, MicroBatch
from headway.core.runs import RunPaths
from headway.transport.announcements import latest
from headway.transport.rollouts import make_receiver, make_sender
from headway.transport.weights import http
from headway.transport.weights import make_receiver as make_weight_receiver
from headway.transport.weights import make_sender as make_weight_sender


@pytest.fixture
def paths(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> RunPaths:
    monkeypatch.setenv("HEADWAY_TOKEN", "secret")
    return RunPaths(tmp_path)


def weights(seed: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {"a": torch.randn(300, 7, generator=generator), "b": torch.randn(5, generator=generator).bfloat16()}


def test_weights_come_in_ranges_and_are_what_was_sent(paths: RunPaths, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http, "CHUNK_BYTES", 1000)
    sender = make_weight_sender(HttpWeights(), paths)
    for version in range(4):
        sender.publish(version, weights(version).items())
        got = dict(make_weight_receiver().receive(latest(paths)))  # type: ignore[arg-type]
        assert all(torch.equal(got[name], tensor) for name, tensor in weights(version).items())
    assert sorted(entry.name for entry in paths.weights.glob("v*")) == [
        "v000002", "v000002.json", "v000003", "v000003.json",
    ]  # fmt: skip
    update = latest(paths)
    assert update is not None and update.transport["urls"] == [f"http://127.0.0.1:{sender._server.port}"]  # type: ignore[attr-defined]
    monkeypatch.setenv("HEADWAY_TOKEN", "wrong")
    with pytest.raises(HeadwayError, match="status 401"):
        dict(make_weight_receiver().receive(update))
    sender.close()


def test_a_damaged_or_withdrawn_version_is_refused(paths: RunPaths) -> None:
    sender = make_weight_sender(HttpWeights(), paths)
    update = sender.publish(1, weights(1).items())
    file = paths.version(1) / "rank_00000.safetensors"
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)
    with pytest.raises(HeadwayError, match="fingerprint"):
        dict(make_weight_receiver().receive(update))
    for version in (2, 3, 4):
        sender.publish(version, weights(version).items())
    with pytest.raises(HeadwayError, match="status 404"):
        dict(make_weight_receiver().receive(update))
    sender.close()


def test_weights_over_http_demand_a_token(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("HEADWAY_TOKEN", raising=False)
    with pytest.raises(UsageError, match="HEADWAY_TOKEN"):
        make_weight_sender(HttpWeights(), RunPaths(tmp_path))


def test_rollouts_beyond_loopback_go_to_those_who_know_the_token(
    paths: RunPaths, monkeypatch: pytest.MonkeyPatch
) -> None:
    everywhere = ZmqRollouts(address="tcp://0.0.0.0:0")
    sender = make_sender(everywhere, paths)
    batch = Batch(1, [[MicroBatch.blank([4])]], ComponentCounts(rl=4))
    sender.send(batch, b"{}")
    receiver = make_receiver(everywhere, paths, 0, 1)
    part = receiver.receive(1, timeout=120)
    assert part is not None and part.counts == ComponentCounts(rl=4)
    receiver.close()
    monkeypatch.setenv("HEADWAY_TOKEN", "wrong")
    stranger = make_receiver(everywhere, paths, 0, 1)
    assert stranger.receive(1, timeout=0.5) is None
    stranger.close()
    monkeypatch.delenv("HEADWAY_TOKEN")
    with pytest.raises(UsageError, match="can be reached by others"):
        make_receiver(everywhere, paths, 0, 1)
    sender.close()
