"""One rollout for a reader: the record as it is, and its tokens with what was recorded about each."""

import math
import time
from collections.abc import Iterator
from functools import lru_cache
from itertools import islice
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np

from headway.base.errors import HeadwayError
from headway.core.episodes import Node
from headway.core.records import RolloutRecord, read_trained_logprobs
from headway.core.runs import RunPaths
from headway.core.samples import BranchKey
from headway.monitor.dashboard.index import Filter, RolloutIndex
from headway.monitor.dashboard.summary import read_settings

if TYPE_CHECKING:
    from tokenizers import Tokenizer

BUILT_IN = ("tiny", "tiny-llama", "tiny-moe", "tiny-glm4-moe", "tiny-gpt-oss")
"""Models that come with the package and share one tokenizer."""
SEARCH_SECONDS = 1.5
"""A search answers after this long with what it found, and goes on when asked to."""


def page(index: RolloutIndex, wanted: Filter, offset: int, limit: int) -> dict[str, Any]:
    found = index.select(wanted)
    return {"total": len(found), "offset": offset, "rows": index.rows(found[offset : offset + limit])}


def search(index: RolloutIndex, wanted: Filter, text: str, offset: int, limit: int) -> dict[str, Any]:
    """Rollouts that match and contain `text`, from match number `offset` on; `next` is where to go on, or None.

    Looks into the files of matching rollouts one by one, for a bounded time.
    """
    found, until = index.select(wanted), time.monotonic() + SEARCH_SECONDS
    needle = msgspec.json.encode(text)[1:-1].lower()
    hits: list[int] = []
    position, lines, step = offset, [b""], -1
    while position < len(found) and len(hits) < limit and time.monotonic() < until:
        row = index.rows(found[position : position + 1])[0]
        if row["step"] != step:
            step, lines = row["step"], [line.lower() for line in index.records(row["step"])]
        if row["line"] < len(lines) and needle in lines[row["line"]]:
            hits.append(int(found[position]))
        position += 1
    return {
        "total": len(found),
        "offset": offset,
        "rows": index.rows(np.array(hits, dtype=np.intp)),
        "next": position if position < len(found) else None,
    }


def read_record(index: RolloutIndex, step: int, line: int) -> RolloutRecord:
    """Raises KeyError when there is none, or it is damaged."""
    raw = next(islice(index.records(step), max(line, 0), None), None)
    if raw is None:
        raise KeyError(f"{step}/{line}")
    try:
        return msgspec.json.decode(raw, type=RolloutRecord)
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise KeyError(f"{step}/{line}: {error}") from None


def view_record(record: RolloutRecord) -> dict[str, Any]:
    """The record without the long lists of numbers, which `view_tokens` hands out in pieces."""
    plain: dict[str, Any] = msgspec.to_builtins(record)
    for trace, full in zip(plain["episode"]["traces"], record.episode.traces, strict=True):
        trace["branches"] = full.branches()
        for node, source in zip(trace["nodes"], full.nodes, strict=True):
            node["tokens"], node["sampled"] = len(source.token_ids), source.sampled
            for name in ("token_ids", "logprobs", "routed_experts"):
                node.pop(name, None)
    return plain


def view_tokens(
    record: RolloutRecord, paths: RunPaths, trace: int, branch: int, offset: int, limit: int
) -> dict[str, Any]:
    """Return columns over the tokens of one branch, null where not sampled: id, text, logprob, version, and the ratio
    of the trainer's probability to the engine's; and the advantage of all.

    Raises KeyError when there is no such trace or branch.
    """
    try:
        chosen = record.episode.traces[trace]
        path = chosen.branches()[branch]
    except IndexError:
        raise KeyError(f"trace {trace}, branch {branch}") from None
    every = [entry for number in path for entry in _tokens(chosen.nodes[number], number)]
    part = every[offset : offset + limit]
    trained = _trained_logprobs(paths, record.step, BranchKey(record.episode.id, trace, path[-1]))
    sample = record.find_sample(trace, path[-1])
    return {
        "total": len(every),
        "offset": offset,
        "ids": [entry[0] for entry in part],
        "texts": _texts(find_tokenizer(paths), [entry[0] for entry in part]),
        "logprobs": [entry[1] for entry in part],
        "versions": [entry[2] for entry in part],
        "ratios": [ratio(trained.get(offset + place), entry[1]) for place, entry in enumerate(part)],
        "nodes": [entry[3] for entry in part],
        "advantage": sample.advantage if sample is not None else None,
    }


def _trained_logprobs(paths: RunPaths, step: int, branch: BranchKey) -> dict[int, float]:
    """Return the trainer's logprobs by position in the branch; empty where it kept none of them."""
    found: dict[int, float] = {}
    for sample in read_trained_logprobs(paths, step):
        if sample.key == branch:
            places = [at for start, length in sample.spans for at in range(start, start + length)]
            found |= dict(zip(places, sample.logprobs.tolist(), strict=False))
    return found


def ratio(trained: float | None, sampled: float | None) -> float | None:
    """Return how much likelier the trainer found a token than the engine that sampled it; None where unknown."""
    if trained is None or sampled is None:
        return None
    value = math.exp(min(trained - sampled, 100.0))
    return value if math.isfinite(value) else None


def _tokens(node: Node, number: int) -> Iterator[tuple[int, float | None, int | None, int]]:
    versions = [version for version, count in node.versions for _ in range(min(count, len(node.token_ids)))]
    for place, token in enumerate(node.token_ids):
        logprob = node.logprobs[place] if node.logprobs is not None and place < len(node.logprobs) else None
        yield token, logprob, versions[place] if place < len(versions) else None, number


def _texts(tokenizer: "Tokenizer | None", ids: list[int]) -> list[str]:
    if tokenizer is None:
        return [f"⟨{token}⟩" for token in ids]
    return [tokenizer.decode([token], skip_special_tokens=False) or f"⟨{token}⟩" for token in ids]


def find_tokenizer(paths: RunPaths) -> "Tokenizer | None":
    """Load the tokenizer that a run's tokens belong to: that of its exports, else of the model its settings name."""
    folders = [file.parent for file in sorted(paths.exports.glob("step_*/tokenizer.json"), reverse=True)[:1]]
    model = (read_settings(paths).get("model") or {}).get("path")
    if isinstance(model, str):
        folders.append(Path(model).expanduser())
    found = next((folder for folder in folders if (folder / "tokenizer.json").is_file()), None)
    if found is not None:
        return _load(found)
    return _built_in() if model in BUILT_IN else None


@lru_cache(maxsize=4)
def _load(folder: Path) -> "Tokenizer | None":
    from headway.rendering.tokenizer import load_tokenizer

    try:
        return load_tokenizer(folder)
    except HeadwayError:
        return None


@lru_cache(maxsize=1)
def _built_in() -> "Tokenizer | None":
    """Make the tokenizer of the built-in models: a page that only reads does not fill the cache of models."""
    from headway.models.tiny_tokenizer import save_tiny_tokenizer

    with TemporaryDirectory() as folder:
        save_tiny_tokenizer(Path(folder))
        return _load(Path(folder))
