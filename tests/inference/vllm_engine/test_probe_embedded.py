"""The embedded engine holds a version to its probe before it takes it over."""

from dataclasses import replace
from pathlib import Path

import msgspec
import pytest
from proof_helpers import Updates

from headway.base.errors import HeadwayError
from headway.inference.embedded.engine import EmbeddedEngine
from headway.inference.embedded.scheduling.scheduler import EngineLimits
from headway.inference.embedded.updates.probe import check_probe
from headway.inference.embedded.updates.updater import Updater
from headway.inference.errors import UpdateError
from headway.models.build import build_model
from headway.models.checkpoints.folders import load_model
from headway.models.checkpoints.tensors import hf_tensors, load_hf_tensors
from headway.models.tiny import resolve_model

LIMITS = EngineLimits(4, 64, 64, 16, 16)


@pytest.mark.parametrize("model", ["tiny", "tiny-llama", "tiny-moe"])
def test_what_the_trainer_publishes_passes(tmp_path: Path, model: str) -> None:
    engine = EmbeddedEngine(load_model(resolve_model(model)).eval(), LIMITS)
    updater = Updater(engine)
    with Updates(tmp_path, model) as updates:
        update = updates.next()
        assert update.probe is not None
        updater.switch(updater.stage(update))
    assert engine.version == 1


def test_an_engine_whose_shape_differs_refuses_and_names_the_layer(tmp_path: Path) -> None:
    """Equal tensors, another rotary base: the fingerprint can't tell, the probe can."""
    trained = load_model(resolve_model("tiny"))
    other = build_model(replace(trained.config, rope_theta=500.0), seed=None)
    load_hf_tensors(other, hf_tensors(trained))
    updater = Updater(EmbeddedEngine(other.eval(), LIMITS))
    with Updates(tmp_path, "tiny") as updates, pytest.raises(UpdateError, match=r"version 1 .*layer 0 is suspect"):
        updater.stage(updates.next())


def test_a_wrong_tensor_is_found_in_its_layer(tmp_path: Path) -> None:
    with Updates(tmp_path, "tiny") as updates:
        probe = updates.next().probe
        model = updates.model()
    assert probe is not None
    check_probe(model, probe)
    wrong = load_model(resolve_model("tiny"))
    for name, place in (("layers.1.mlp.down_proj", "layer 1"), ("model.norm", "the final norm")):
        load_hf_tensors(wrong, ((n, t if name not in n else t * 1.01) for n, t in hf_tensors(model)))
        with pytest.raises(HeadwayError, match=f"{place} is suspect"):
            check_probe(wrong, probe)


def test_an_update_without_a_probe_is_taken_as_before(tmp_path: Path) -> None:
    engine = EmbeddedEngine(load_model(resolve_model("tiny")).eval(), LIMITS)
    updater = Updater(engine)
    with Updates(tmp_path, "tiny") as updates:
        updater.switch(updater.stage(msgspec.structs.replace(updates.next(), probe=None)))
    assert engine.version == 1
