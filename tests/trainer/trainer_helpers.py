"""What the trainer's tests share: small batches with every stream in use, a reference written in plain PyTorch, and
groups of real processes."""

import multiprocessing
import os
import sys
import threading
import traceback
import warnings
from collections.abc import Callable
from functools import cache
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.distributed import TCPStore
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.tensor import DTensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from headway.config.shared import FilesystemRollouts
from headway.config.trainer import TrainSettings
from headway.core.batches import Batch, ComponentCounts, MicroBatch
from headway.core.runs import RunPaths
from headway.core.samples import BranchKey
from headway.models.attention import PackedPlan
from headway.models.decoder import DecoderLM
from headway.models.packed import PackedTokens
from headway.models.registry import load_config
from headway.models.tiny import resolve_model
from headway.trainer.feed import fake_micro_batch
from headway.transport.rollouts import make_sender

_PATIENCE_SECONDS = 200
"""After which a rank tells where it hangs; before the time limit of a test."""
LENGTHS = [[9, 17, 4], [24, 5], [30], [3, 3, 12, 8]]


def rich_micro_batch(lengths: list[int], vocab: int, seed: int) -> MicroBatch:
    """All three components, several temperatures, off-policy logprobs."""
    rng = np.random.default_rng(seed)
    micro = fake_micro_batch(lengths, vocab, rng)
    size = sum(lengths)
    micro.sampled = micro.positions >= np.repeat(np.maximum(np.asarray(lengths) // 2, 1), lengths)
    micro.rl_weight = micro.sampled.astype(np.float32)
    micro.logprobs = np.where(micro.sampled, rng.uniform(-7, -3, size), 0).astype(np.float32)
    micro.ce_weight = np.where(~micro.sampled & (rng.random(size) < 0.5), 0.1, 0).astype(np.float32)
    micro.ref_kl_weight = np.where(micro.sampled & (rng.random(size) < 0.5), 1, 0).astype(np.float32)
    micro.ref_logprobs = np.where(micro.sampled, rng.uniform(-7, -3, size), 0).astype(np.float32)
    micro.keys = [BranchKey(f"{rng.bytes(4).hex()}.0.0", 0, 1) for _ in lengths]
    micro.temperatures = np.repeat(rng.choice([0.7, 1.0, 1.3], len(lengths)), lengths).astype(np.float32)
    return micro


def rich_batch(step: int, ranks: int, vocab: int, lengths: list[list[int]] = LENGTHS) -> Batch:
    """The same micro-batches, dealt to any number of ranks that divides them."""
    micros = [rich_micro_batch(n, vocab, seed=100 * step + i) for i, n in enumerate(lengths)]
    share = len(micros) // ranks
    dealt = [micros[rank * share : (rank + 1) * share] for rank in range(ranks)]
    return Batch(step, dealt, counts_of(micros))


def counts_of(micros: list[MicroBatch]) -> ComponentCounts:
    def count(name: str) -> int:
        return sum(int(np.count_nonzero(getattr(micro, name))) for micro in micros)

    return ComponentCounts(count("rl_weight"), count("ce_weight"), count("ref_kl_weight"))


def small_settings(**changes: Any) -> TrainSettings:
    """TrainSettings for a CPU; `changes` are dotted names with `__` for dots."""
    tree: dict[str, Any] = {
        "placement": {"device": "cpu"},
        "seq_len": 64,
        "weights": {"type": "filesystem"},
        "trainer": {"optim": {"type": "adamw"}},
    }
    for dotted, value in changes.items():
        *path, last = dotted.split("__")
        branch = tree
        for name in path:
            branch = branch.setdefault(name, {})
        branch[last] = value
    return TrainSettings.model_validate(tree)


def run_paths(folder: Path) -> RunPaths:
    paths = RunPaths(folder)
    for part in (paths.metrics, paths.control, paths.batches):
        part.mkdir(parents=True, exist_ok=True)
    return paths


@cache
def vocab_of(model: str) -> int:
    return load_config(resolve_model(model)).vocab_size


def reference_gradients(model: DecoderLM, batch: Batch) -> tuple[float, dict[str, torch.Tensor]]:
    """The loss (dppo + ce + ref_kl) and its gradients: sample by sample, full logits, plain autograd."""
    total = torch.zeros(())
    for micro in (micro for rank in batch.ranks for micro in rank):
        start = 0
        for length in micro.lengths:
            here = slice(start, start + length)
            total = total + _sample_loss(model, micro, here, batch.counts)
            start += length
    names, parameters = zip(*model.named_parameters(), strict=True)
    gradients = torch.autograd.grad(total, parameters)
    return total.item(), dict(zip(names, gradients, strict=True))


def _sample_loss(model: DecoderLM, micro: MicroBatch, here: slice, counts: ComponentCounts) -> torch.Tensor:
    def stream(name: str) -> torch.Tensor:
        return torch.tensor(getattr(micro, name)[here][1:])

    ids = torch.tensor(micro.token_ids[here], dtype=torch.long)
    hidden = model(PackedTokens(ids, torch.arange(len(ids)), PackedPlan([len(ids)]))).hidden_TD
    logits = model.logits(hidden)[:-1] / stream("temperatures")[:, None]
    logprob = torch.log_softmax(logits, -1).gather(1, ids[1:, None])[:, 0]
    old, advantage, ref = stream("logprobs"), stream("advantages"), stream("ref_logprobs")
    ratio = (logprob - old).exp()
    moved = (logprob.exp() - old.exp()).detach()
    keep = ~(((advantage > 0) & (moved > 0.2)) | ((advantage <= 0) & (moved < -0.2)))
    rl = 1e-3 * (logprob - old) ** 2 - keep * advantage * ratio
    distill = 1e-3 * (logprob - old) ** 2 - (moved >= -0.2) * (ref - logprob).detach() * ratio
    return (
        (stream("rl_weight") * rl).sum() / counts.rl
        + (stream("ce_weight") * -logprob).sum() / counts.ce
        + (stream("ref_kl_weight") * distill).sum() / counts.ref_kl
    )


def run_ranks(ranks: int, work: Callable[..., Any], *args: Any) -> list[Any]:
    """Run `work(*args)` as `ranks` real processes, as torchrun would; what each returned."""
    context = multiprocessing.get_context("forkserver")
    # Held here, as torchrun does: a port that is free now may be taken when the first rank would listen at it.
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    pipes, processes = [], []
    for rank in range(ranks):
        ours, theirs = context.Pipe()
        process = context.Process(target=_be_rank, args=(rank, ranks, store.port, theirs, work, args))
        process.start()
        theirs.close()
        pipes.append(ours)
        processes.append(process)
    results: dict[Connection, Any] = {}
    try:
        while len(results) < ranks:
            for pipe in wait([pipe for pipe in pipes if pipe not in results]):
                assert isinstance(pipe, Connection)
                failed, results[pipe] = _outcome(pipe)
                assert not failed, results[pipe]
        return [results[pipe] for pipe in pipes]
    except BaseException:  # the others may wait for a rank that failed, and one that hangs never ends
        for process in processes:
            process.kill()
        raise
    finally:
        for process in processes:
            process.join()


def _outcome(pipe: Connection) -> tuple[bool, Any]:
    try:
        return pipe.recv()  # type: ignore[no-any-return]
    except EOFError:
        return True, "a rank died"


def _be_rank(rank: int, ranks: int, port: int, pipe: Connection, work: Callable[..., Any], args: Any) -> None:
    os.environ |= {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(ranks),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "TORCHELASTIC_USE_AGENT_STORE": "True",
    }
    torch.set_num_threads(1)
    watchdog = threading.Timer(_PATIENCE_SECONDS, lambda: pipe.send((True, f"rank {rank} hangs:\n{_stacks()}")))
    watchdog.daemon = True
    watchdog.start()
    try:
        result = (False, work(*args))
    except BaseException:
        result = (True, traceback.format_exc())
    watchdog.cancel()
    pipe.send(result)


def _stacks() -> str:
    """Where every thread of this process is."""
    return "\n".join("".join(traceback.format_stack(frame)) for frame in sys._current_frames().values())


class LateCopies:
    """Copies to a "device" that is CPU memory too, each as late as its contract allows: when it is waited for.

    Until then the target holds NaN. `events` tells what happened: ("out" or "in", number) when a copy starts and
    ("wait", number) when it is first waited for.
    """

    def __init__(self) -> None:
        self.events: list[tuple[str, int]] = []
        self._queue: list[_LateCopy] = []

    @property
    def unfinished(self) -> int:
        return len(self._queue)

    def takes(self, tensor: torch.Tensor) -> bool:
        return True

    def to_host(self, tensor: torch.Tensor, into: torch.Tensor | None = None) -> "_LateCopy":
        return self._start("out", tensor, torch.full_like(tensor, torch.nan) if into is None else into)

    def to_device(self, tensor: torch.Tensor) -> "_LateCopy":
        return self._start("in", tensor, torch.full_like(tensor, torch.nan))

    def host_zeros(self, like: torch.Tensor) -> torch.Tensor:
        return torch.zeros_like(like, requires_grad=False)

    def finish(self) -> None:
        for copy in list(self._queue):
            self.run_up_to(copy)

    def run_up_to(self, last: "_LateCopy") -> None:
        """Copies run in order, as on a stream."""
        while last in self._queue:
            self._queue.pop(0).run()

    def _start(self, way: str, source: torch.Tensor, target: torch.Tensor) -> "_LateCopy":
        copy = _LateCopy(self, sum(event[0] != "wait" for event in self.events), source.detach(), target)
        self.events.append((way, copy.number))
        self._queue.append(copy)
        return copy


class _LateCopy:
    def __init__(self, copies: LateCopies, number: int, source: torch.Tensor, target: torch.Tensor) -> None:
        self.number, self._copies, self._source, self._target = number, copies, source, target

    def run(self) -> None:
        with torch.no_grad():
            self._target.copy_(self._source)

    def wait(self) -> torch.Tensor:
        self._copies.events.append(("wait", self.number))
        self._copies.run_up_to(self)
        return self._target


def spool(paths: RunPaths, steps: range, ranks: int = 1, model: str = "tiny") -> None:
    """Put batches where the trainer of a run looks for them."""
    sender = make_sender(FilesystemRollouts(), paths)
    for step in steps:
        sender.send(rich_batch(step, ranks, vocab_of(model)), b"{}")


def checkpoint_tensors(paths: RunPaths, step: int) -> dict[str, torch.Tensor]:
    """Everything in a checkpoint, whole."""
    reader = FileSystemReader(paths.checkpoint(step) / "trainer")
    metadata = reader.read_metadata().state_dict_metadata
    tensors = {name: torch.empty(entry.size, dtype=entry.properties.dtype) for name, entry in metadata.items()}
    with warnings.catch_warnings(action="ignore"):
        load(tensors, storage_reader=reader, no_dist=True)
    return tensors


class LiveMemory(TorchDispatchMode):
    """Tracks the memory of tensors that operations make inside, and that are still referred to: its `peak`, in bytes.

    What is mapped from files is not counted until it is copied.
    """

    def __init__(self) -> None:
        super().__init__()
        self.peak = 0
        self._storages: dict[int, StorageWeakRef] = {}
        self._sizes: dict[int, int] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented  # it is told of the operations on the parts here
        # Whatever an operation was given existed before it: a view of a mapped file makes nothing.
        given = {_storage_of(leaf) for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)}
        result = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(result):
            if isinstance(leaf, torch.Tensor) and not leaf.is_meta and _storage_of(leaf) not in given:
                storage = leaf.untyped_storage()
                self._storages[storage._cdata] = StorageWeakRef(storage)
                self._sizes[storage._cdata] = storage.nbytes()
        self._storages = {key: ref for key, ref in self._storages.items() if not ref.expired()}
        self.peak = max(self.peak, sum(self._sizes[key] for key in self._storages))
        return result


def _storage_of(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage()._cdata
