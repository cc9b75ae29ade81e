"""A contributor that lies, as a process: `python swarm_liar.py URL FOLDER ENV KIND...`.

It lies in one way until its key is cut off, goes on with a new key and the next kind, and notes each lie in
FOLDER/lies.jsonl. Its lies are made with care: where it can, it claims what an honest worker would.
"""

import asyncio
import itertools
import json
import sys
import time
from collections.abc import Callable
from pathlib import Path

import msgspec
import torch
from torch import Tensor

from headway.base.errors import HeadwayError
from headway.base.files import atomic_directory
from headway.core.episodes import Episode, Node
from headway.launch.contribute.contributor import Contributor
from headway.launch.contribute.engine import LocalEngine
from headway.launch.contribute.options import ContributeOptions
from headway.models.checkpoints.folders import read_tensors
from headway.swarm.messages.orders import WorkOrder
from headway.swarm.weights.manifest import AdapterTerms
from headway.swarm.weights.peer import CutOffError
from headway.swarm.weights.versions import write_version

Change = Callable[[Tensor], Tensor]


def noisy(weight: Tensor) -> Tensor:
    return weight + 5e-3 * torch.randn(weight.shape, generator=torch.Generator().manual_seed(0)).to(weight.dtype)


def rounded(weight: Tensor) -> Tensor:
    """Round a matrix to int8, with a scale for each row."""
    if weight.dim() != 2:
        return weight
    scale = weight.abs().amax(1, keepdim=True) / 127
    return (weight / scale).round() * scale


class LyingEngine(LocalEngine):
    """Serves other weights than those that it was given, under their version."""

    def __init__(self, engine: LocalEngine, kind: str, folder: Path) -> None:
        super().__init__(engine._options, engine._terms)
        self._kind, self._folder = kind, folder
        self._first: Path | None = None
        self.lies = kind != "older_version"

    async def serve(self, folder: Path, version: int, fingerprint: str, adapter: AdapterTerms | None = None) -> None:
        if self._first is None:
            self._first = self._copy(folder, folder, -1, lambda weight: weight)[0]
        change: dict[str, Change] = {"other_weights": noisy, "quantized_weights": rounded}
        source = self._first if self._kind == "older_version" else folder
        changed, name = self._copy(source, folder, version, change.get(self._kind, lambda weight: weight))
        self.lies = name != fingerprint
        await super().serve(changed, version, name)

    def _copy(self, folder: Path, base: Path, version: int, change: Change) -> tuple[Path, str]:
        made = self._folder / f"lie-{version}"
        with atomic_directory(made) as aside:
            name = write_version(aside, base, version, {key: change(of) for key, of in read_tensors(folder)})
        return made, name


class Liar(Contributor):
    """Samples like everyone else, or with other weights, and changes what it sends."""

    kind, lies = "", Path()
    _earlier: list[Episode] | None = None

    async def _prepare(self, *arguments: object) -> None:
        if self.kind.endswith(("weights", "version")) and not isinstance(self._engine, LyingEngine):
            self._engine = LyingEngine(self._engine, self.kind, self._folder)
        await super()._prepare(*arguments)  # type: ignore[arg-type]

    async def _play(self, order: WorkOrder) -> list[Episode]:
        if self.kind == "other_temperature":
            episodes = await self._colder(order)
        elif self.kind == "replayed" and self._earlier is not None:
            episodes = readdressed(self._earlier, order)
        else:
            episodes = await super()._play(order)
            if self.kind == "replayed":
                self._earlier = episodes
                return episodes
        for episode in episodes:
            EDITS.get(self.kind, lambda _: None)(episode)
        if not isinstance(self._engine, LyingEngine) or self._engine.lies:
            with self.lies.open("a") as file:
                file.write(json.dumps({"order": order.id, "kind": self.kind, "at": time.time()}) + "\n")
        return episodes

    async def _colder(self, order: WorkOrder) -> list[Episode]:
        sampling = msgspec.structs.replace(order.sampling, temperature=0.5)
        episodes = await super()._play(msgspec.structs.replace(order, sampling=sampling))
        for node in (node for episode in episodes for node in sampled(episode)):
            node.temperature = order.sampling.temperature
        return readdressed(episodes, order)


def readdressed(episodes: list[Episode], order: WorkOrder) -> list[Episode]:
    """Give out episodes as those of an order."""
    changed = []
    for index, episode in enumerate(episodes):
        request = order.request(index)
        changed.append(
            msgspec.structs.replace(
                episode, id=request.episode_id, group_id=request.group_id, task=order.task, version=order.version
            )
        )
        for node in sampled(changed[-1]):
            node.versions = [(order.version, len(node.token_ids))]
    return changed


def sampled(episode: Episode) -> list[Node]:
    return [node for node in episode.traces[0].nodes if node.sampled]


def edit_rewards(episode: Episode) -> None:
    trace = episode.traces[0]
    trace.rewards = dict.fromkeys(trace.rewards, 1.5)
    trace.reward = 1.5


def edit_logprobs(episode: Episode) -> None:
    for node in sampled(episode):
        assert node.logprobs is not None
        node.logprobs[0] -= 0.5


def edit_tokens(episode: Episode) -> None:
    for node in sampled(episode):
        node.token_ids[0] = (node.token_ids[0] + 1) % 60


EDITS = {"invented_rewards": edit_rewards, "edited_logprobs": edit_logprobs, "edited_tokens": edit_tokens}


def main(url: str, folder: str, env: str, *kinds: str) -> None:
    lies = Path(folder) / "lies.jsonl"
    lies.parent.mkdir(parents=True, exist_ok=True)
    for life, kind in enumerate(itertools.cycle(kinds)):
        options = ContributeOptions(url, Path(folder) / f"{life}-{kind}", env=env, threads=1)
        liar = Liar(options, lambda line, kind=kind: print(f"{kind}: {line}", flush=True))
        liar.kind, liar.lies = kind, lies
        try:
            asyncio.run(liar.run())
        except CutOffError as error:
            print(f"{kind}: {error}", flush=True)
        except HeadwayError as error:
            print(f"{kind}: ended by {error}", flush=True)
            time.sleep(1)


if __name__ == "__main__":
    main(*sys.argv[1:])
