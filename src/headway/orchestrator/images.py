"""Images of trained episodes: stored once per run, and added to samples as patches when their batch is made."""

import json
from collections.abc import Iterable, Sequence
from pathlib import Path

from headway.algorithms.base import Rollout
from headway.core.episodes import Episode
from headway.core.image_files import ImageFiles
from headway.core.runs import RunPaths
from headway.core.samples import Sample
from headway.envs.samples import branch_images
from headway.models.images.reader import file_reader


def run_images(paths: RunPaths, model: Path) -> "BatchImages | None":
    """The images of a run; None where the model in folder `model` does not see."""
    try:
        config = json.loads((model / "config.json").read_text())
    except (OSError, ValueError):
        return None
    return BatchImages(ImageFiles(paths.images), model) if "vision_config" in config else None


class BatchImages:
    """Knows the images of a run, and the processor of the model in `folder`, which is read at the first image."""

    def __init__(self, files: ImageFiles, folder: Path) -> None:
        self._files, self._read = files, file_reader(files, folder)

    def keep(self, episodes: Sequence[Episode]) -> None:
        """Store the images of episodes."""
        for episode in episodes:
            self._files.keep(episode.images)

    def add_to(self, samples: Sequence[Sample], episode: Episode) -> None:
        """Give samples of an episode their images. Raises HeadwayError where one is not there."""
        for sample in samples:
            nodes = [episode.traces[sample.trace].nodes[index] for index in sample.nodes]
            if sample.images is None and any(node.images for node in nodes):
                sample.images = branch_images(nodes, self._read)

    def add_to_rollouts(self, rollouts: Iterable[Rollout]) -> None:
        """Give all samples of rollouts their images."""
        for rollout in rollouts:
            self.add_to(rollout.samples, rollout.episode)
