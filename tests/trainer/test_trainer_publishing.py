"""What goes out is the same whoever holds it: one rank, two that share, or two groups that replicate."""

from pathlib import Path
from unittest.mock import patch

import pytest
import torch
from torch.distributed.tensor import DTensor
from trainer_helpers import run_paths, run_ranks, small_settings

from headway.models.checkpoints.folders import load_model
from headway.models.checkpoints.tensors import hf_tensors
from headway.models.tiny import resolve_model
from headway.trainer.parallel.ranks import joined
from headway.trainer.publisher import Publisher
from headway.trainer.state import build_state
from headway.transport.announcements import latest
from headway.transport.weights import make_receiver

MODELS = ["tiny", "tiny-llama", "tiny-moe"]


def publish_all(folder: Path, ranks: int, replicas: int) -> list[str]:
    """Publish each model's first version; the fingerprints."""
    found = []
    layout = {"placement__trainer_ranks": ranks, "trainer__parallel__replicate": replicas}
    with joined(small_settings(**layout)) as group:
        for model in MODELS:
            settings = small_settings(model__path=model, **layout)
            publisher, state = Publisher(settings, run_paths(folder / model)), build_state(settings, group)
            with patch.object(DTensor, "full_tensor", side_effect=AssertionError("a whole tensor was gathered")):
                assert publisher.publish(state)["publish_bytes"] > 0
            publisher.close()
            update = latest(run_paths(folder / model))
            assert update is not None
            found.append(update.fingerprint)
    return found


def test_every_layout_publishes_the_same_weights(tmp_path: Path) -> None:
    alone = publish_all(tmp_path / "alone", 1, 1)
    for ranks, replicas in ((2, 1), (4, 2)):
        folder = tmp_path / f"{ranks}x{replicas}"
        for fingerprints in run_ranks(ranks, publish_all, folder, ranks, replicas):
            assert fingerprints == alone
        for model in MODELS:
            update = latest(run_paths(folder / model))
            assert update is not None
            got = dict(make_receiver().receive(update))
            want = dict(hf_tensors(load_model(resolve_model(model))))
            assert got.keys() == want.keys()
            for name, tensor in want.items():
                assert torch.equal(got[name].view(tensor.shape), tensor), name


@pytest.mark.parametrize("transport", ["point_to_point", "shared_memory"])
def test_the_other_transports_take_what_the_publisher_gives(tmp_path: Path, transport: str) -> None:
    settings = small_settings(weights={"type": transport})
    paths = run_paths(tmp_path)
    with joined(settings) as ranks:
        publisher = Publisher(settings, paths)
        publisher.publish(build_state(settings, ranks))
        update = latest(paths)
        publisher.close()
    assert update is not None and update.transport["type"] == transport
