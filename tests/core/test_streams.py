"""The table of per-token streams: everything between an algorithm and the trainer's inputs follows from it."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np

import headway
from headway.core.batches import ComponentCounts, MicroBatch
from headway.core.samples import Sample
from headway.core.streams import streams_of

SOURCE = Path(headway.__file__).parent
NEW_LINE = "    surprise: Annotated[Floats, Fill(-1)]\n"
PROGRAM = """
import sys
from pathlib import Path
import numpy as np
import torch
from headway.algorithms.base import Algorithm, Group, Rollout
from headway.config.shared import FilesystemRollouts
from headway.core.episodes import Episode, Node, Task, Trace
from headway.core.packing import Cost, make_batch
from headway.core.runs import RunPaths
from headway.envs.samples import episode_samples
from headway.models.checkpoints.folders import load_config
from headway.models.tiny import resolve_model
from headway.trainer.inputs import prepare
from headway.transport.rollouts import make_receiver, make_sender

class Surprised(Algorithm):
    def score(self, group):
        for trace, sample in group.samples():
            sample.rl_weight[sample.sampled] = 1
            sample.surprise[sample.sampled] = trace.reward

def episode(name, reward):
    nodes = [Node(-1, [1, 2]), Node(0, [3, 4, 5], None, [-1.0] * 3, [(0, 3)])]
    return Episode(name, "g", "env", Task("t"), traces=[Trace(nodes=nodes, reward=reward)])

episodes = [episode("one", 7.0), episode("two", 8.0)]
group = Group("g", "env", Task("t"), [Rollout(e, episode_samples(e)) for e in episodes])
Surprised().score(group)
paths = RunPaths(Path(sys.argv[1]))
samples = [sample for _, sample in group.samples()]
make_sender(FilesystemRollouts(), paths).send(make_batch(1, samples, seq_len=16, ranks=2, cost=Cost()), b"{}")
for rank, reward in enumerate((7.0, 8.0)):
    part = make_receiver(FilesystemRollouts(), paths, rank, 2).receive(1, timeout=0)
    (micro,) = part.micro_batches
    assert micro.surprise.tolist() == [-1, -1, reward, reward, reward], micro.surprise
    inputs = prepare(micro, load_config(resolve_model("tiny")), torch.device("cpu"))
    assert inputs.scored_stream("surprise").tolist() == [reward] * 3
print("arrived")
"""


def test_a_new_signal_is_one_line_of_the_table(tmp_path: Path) -> None:
    """Add the line to a copy of the package; the signal then travels from an algorithm to the trainer's inputs."""
    shutil.copytree(SOURCE, tmp_path / "headway", ignore=shutil.ignore_patterns("__pycache__"))
    table = tmp_path / "headway" / "core" / "streams.py"
    before, after = table.read_text().split("    routed_experts:", 1)
    table.write_text(f"{before}{NEW_LINE}    routed_experts:{after}")
    environment = os.environ | {"PYTHONPATH": str(tmp_path)}
    command = [sys.executable, "-c", PROGRAM, str(tmp_path / "run")]
    done = subprocess.run(command, env=environment, cwd=tmp_path, capture_output=True, text=True, timeout=120)
    assert done.stdout == "arrived\n", done.stderr


def test_blank_streams_have_their_fill_values_and_types() -> None:
    micro = MicroBatch.blank([3, 2])
    assert micro.positions.tolist() == [0, 1, 2, 0, 1] and micro.temperatures.tolist() == [1.0] * 5
    assert set(micro.versions) == {-1} and not micro.sampled.any() and not micro.counted.any()
    for stream in streams_of(MicroBatch).values():
        assert getattr(micro, stream.name).dtype == stream.dtype and len(getattr(micro, stream.name)) == 5
    assert ComponentCounts.of([micro, Sample.blank(4)]) == ComponentCounts()


def test_joined_samples_keep_the_names_of_their_branches() -> None:
    samples = [Sample.blank(2), Sample.blank(3)]
    samples[0].episode_id, samples[0].trace, samples[0].nodes = "e.0", 1, [0, 4]
    micro = MicroBatch.join(samples)
    assert [micro.keys[0], micro.lengths] == [samples[0].key, [2, 3]]
    assert (micro.keys[0].episode, micro.keys[0].trace, micro.keys[0].leaf) == ("e.0", 1, 4)
    np.testing.assert_array_equal(micro.positions, [0, 1, 0, 1, 2])
