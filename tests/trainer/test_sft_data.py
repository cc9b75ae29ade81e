"""Rows become conversations and tokens; broken ones are counted and named; the order and the packing lose nothing."""

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headway.base.errors import HeadwayError, UsageError
from headway.core.packing import Cost, plan_packing
from headway.core.rows import Row, files_in, read_rows
from headway.models.tiny_tokenizer import save_tiny_tokenizer
from headway.rendering.base import Renderer
from headway.rendering.load import load_renderer
from headway.trainer.data.conversations import BadRowError, conversation, tokenize
from headway.trainer.data.order import RowOrder
from headway.trainer.data.packing import counts_of, micro_batches
from headway.trainer.data.rows import TokenRows, tokenize_rows

CHAT = [{"role": "user", "content": "abc"}, {"role": "assistant", "content": "cba"}]


@pytest.fixture(scope="module")
def renderer(tmp_path_factory: pytest.TempPathFactory) -> Renderer:
    folder = tmp_path_factory.mktemp("tokenizer")
    save_tiny_tokenizer(folder)
    return load_renderer(folder)


def _learned_text(row: dict[str, Any], renderer: Renderer, roles: list[str]) -> str:
    tokenized = tokenize(*conversation(row), renderer, roles)
    return renderer.decode([int(t) for t in tokenized.token_ids[tokenized.learned]])


def test_only_what_the_assistant_would_have_sampled_is_learned(renderer: Renderer) -> None:
    chat = [{"role": "system", "content": "be brief"}, *CHAT, {"role": "user", "content": "x"}, CHAT[1]]
    assert _learned_text({"messages": chat}, renderer, ["assistant"]) == "cba<|im_end|>cba<|im_end|>"


def test_other_roles_are_learned_on_request(renderer: Renderer) -> None:
    text = _learned_text({"messages": CHAT}, renderer, ["assistant", "user"])
    assert "abc" in text
    assert text.endswith("cba<|im_end|>")


def test_prompt_and_completion_are_a_turn_each(renderer: Renderer) -> None:
    texts = {"prompt": "abc", "completion": "cba"}
    lists = {"prompt": CHAT[:1], "completion": CHAT[1:]}
    assert conversation(texts) == conversation(lists) == conversation({"messages": CHAT})


def test_tools_and_calls_are_rendered(renderer: Renderer) -> None:
    tool = {"type": "function", "function": {"name": "look", "parameters": {"type": "object", "properties": {}}}}
    call = {"id": "1", "type": "function", "function": {"name": "look", "arguments": {"key": 1}}}
    chat = [CHAT[0], {"role": "assistant", "content": "", "tool_calls": [call]}]
    row = {"messages": chat, "tools": json.dumps([tool])}
    messages, tools = conversation(row)
    assert tools[0].name == "look"
    assert messages[1].tool_calls[0].arguments == '{"key":1}'
    assert '"key":1' in _learned_text(row, renderer, ["assistant"]).replace(" ", "")


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        ({}, "neither messages nor prompt"),
        ({"text": "hello"}, "but text"),
        ({"messages": []}, "must be a text or a list of messages"),
        ({"messages": 3}, "must be a text or a list of messages"),
        ({"messages": ["hi"]}, r"messages\[0\] is not a message"),
        ({"messages": [{"content": "x"}]}, r"messages\[0\].role must be one of"),
        ({"messages": [{"role": "robot", "content": "x"}]}, "'robot'"),
        ({"messages": [{"role": "user", "content": 7}]}, "content must be text"),
        ({"messages": [{"role": "assistant", "tool_calls": [1]}]}, "no call of a function"),
        ({"messages": CHAT[:1]}, "nothing to learn"),
        ({"messages": CHAT, "tools": "{"}, "tools must be a list"),
        ({"messages": CHAT, "tools": [{"name": 3}]}, "tools must be a list"),
    ],
)
def test_broken_rows_say_why(row: dict[str, Any], reason: str, renderer: Renderer) -> None:
    with pytest.raises(BadRowError, match=reason):
        tokenize(*conversation(row), renderer, ["assistant"])


def _write(path: Path, lines: list[str]) -> str:
    path.write_text("\n".join(lines) + "\n")
    return str(path)


def test_broken_rows_are_counted_and_named_up_to_a_bound(tmp_path: Path, renderer: Renderer) -> None:
    good = json.dumps({"messages": CHAT})
    path = _write(tmp_path / "rows.jsonl", [good, "{oops", "", "[1]", '{"prompt": "p"}', good])
    rows, skipped = tokenize_rows(read_rows(path), renderer, seq_len=99, train_roles=["assistant"], max_bad_rows=3)
    assert len(rows) == 2
    assert [line.split(": ")[0].rsplit(":", 1)[1] for line in skipped.bad] == ["2", "4", "5"]
    with pytest.raises(HeadwayError, match=r"max_bad_rows = 2 .*rows.jsonl:2: not a JSON object"):
        tokenize_rows(read_rows(path), renderer, seq_len=99, train_roles=["assistant"], max_bad_rows=2)


def test_long_rows_are_truncated_or_dropped_and_counted(renderer: Renderer) -> None:
    long = {"messages": [CHAT[0], {"role": "assistant", "content": "z" * 100}]}
    hopeless = {"messages": [{"role": "user", "content": "z" * 100}, CHAT[1]]}
    rows = [Row("a:1", {"messages": CHAT}), Row("a:2", long), Row("a:3", hopeless)]
    kept, skipped = tokenize_rows(rows, renderer, seq_len=40, train_roles=["assistant"], too_long="truncate")
    assert (len(kept), skipped.truncated, skipped.dropped) == (2, 1, 1)
    assert max(kept.lengths) == 40
    kept, skipped = tokenize_rows(rows, renderer, seq_len=40, train_roles=["assistant"], too_long="drop")
    assert (len(kept), skipped.truncated, skipped.dropped) == (1, 0, 2)


def test_parquet_rows_are_those_of_jsonl(tmp_path: Path) -> None:
    arrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    data = [{"messages": CHAT}, {"messages": CHAT[:1]}]
    path = _write(tmp_path / "a.jsonl", [json.dumps(row) for row in data])
    parquet.write_table(arrow.Table.from_pylist(data), tmp_path / "a.parquet")
    jsonl = [row.data for row in read_rows(path)]
    assert [row.data for row in read_rows(str(tmp_path / "a.parquet"))] == jsonl
    (tmp_path / "b.parquet").write_bytes(b"nonsense")
    with pytest.raises(UsageError, match=r"b\.parquet: not a Parquet file"):
        list(read_rows(str(tmp_path / "b.parquet")))


def test_a_folder_gives_its_files_in_order_and_knows_splits(tmp_path: Path) -> None:
    for name in ("train-2.jsonl", "train-1.jsonl", "test-1.jsonl"):
        _write(tmp_path / name, [json.dumps({"prompt": name, "completion": "x"})])
    assert [row.data["prompt"] for row in read_rows(str(tmp_path), "train")] == ["train-1.jsonl", "train-2.jsonl"]
    assert [file.name for file in files_in(tmp_path, "test")] == ["test-1.jsonl"]
    assert len(files_in(tmp_path, "other")) == 3


@pytest.mark.parametrize("path", ["", "./nowhere", "nowhere.jsonl", "/nowhere/at/all"])
def test_a_path_that_is_not_there_is_refused(path: str) -> None:
    with pytest.raises(UsageError):
        read_rows(path)


def test_an_empty_folder_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="holds no"):
        list(read_rows(str(tmp_path)))


def test_a_dataset_by_name_needs_the_package(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    with pytest.raises(UsageError, match="pip install 'huggingface_hub<"):
        read_rows("someone/some-chats")


lengths = st.lists(st.integers(2, 50), min_size=1, max_size=60).map(lambda values: np.array(values, np.int64))


@settings(max_examples=80, deadline=None)
@given(lengths, st.integers(10, 200), st.integers(0, 9), st.booleans())
def test_an_epoch_is_every_row_once_and_batches_hold_what_fits(
    sizes: np.ndarray, batch_tokens: int, seed: int, shuffle: bool
) -> None:
    order = RowOrder(sizes, batch_tokens, seed=seed, shuffle=shuffle)
    walked: list[int] = []
    while len(walked) < 3 * len(sizes):
        batch = order.next()
        assert len(batch) == 1 or sizes[batch].sum() <= batch_tokens
        walked += batch.tolist()
    for epoch in range(3):
        part = walked[epoch * len(sizes) : (epoch + 1) * len(sizes)]
        assert sorted(part) == list(range(len(sizes)))
        assert shuffle or part == sorted(part)


@settings(max_examples=60, deadline=None)
@given(lengths, st.integers(10, 200), st.integers(0, 9), st.integers(0, 30))
def test_an_order_goes_on_where_it_was_left(sizes: np.ndarray, batch_tokens: int, seed: int, steps: int) -> None:
    straight = RowOrder(sizes, batch_tokens, seed=seed, shuffle=True)
    for _ in range(steps):
        straight.next()
    resumed = RowOrder(sizes, batch_tokens, seed=seed, shuffle=True)
    resumed.skip(steps)
    assert resumed.progress == straight.progress
    for _ in range(3):
        assert np.array_equal(resumed.next(), straight.next())


@settings(max_examples=120, deadline=None)
@given(lengths, st.integers(50, 120), st.integers(1, 5))
def test_packing_loses_nothing_and_gives_every_rank_as_many_bins(sizes: np.ndarray, seq_len: int, ranks: int) -> None:
    dealt = plan_packing(sizes.tolist(), seq_len, ranks, Cost())
    assert len(dealt) == ranks
    assert len({len(bins) for bins in dealt}) == 1
    packed = [bin for bins in dealt for bin in bins]
    assert sorted(row for bin in packed for row in bin) == list(range(len(sizes)))
    assert all(sum(sizes[row] for row in bin) <= seq_len for bin in packed)


def _rows(count: int, seed: int = 0) -> TokenRows:
    rng = np.random.default_rng(seed)
    sizes = rng.integers(2, 40, count)
    starts = np.cumsum([0, *sizes])
    learned = rng.random(starts[-1]) < 0.5
    learned[starts[:-1]] = False
    return TokenRows(rng.integers(0, 100, starts[-1]).astype(np.int32), learned, starts)


@pytest.mark.parametrize(("count", "ranks"), [(40, 1), (40, 3), (2, 4)])
def test_micro_batches_carry_every_token_once_over_all_ranks(count: int, ranks: int) -> None:
    rows = _rows(count)
    chosen = np.arange(count)
    packed = [micro for rank in range(ranks) for micro in micro_batches(rows, chosen, 64, rank, ranks)]
    assert sum(int(micro.ce_weight.sum()) for micro in packed) == counts_of(rows, chosen).ce == rows.learned.sum()
    samples = set()
    for micro in packed:
        ends = np.cumsum(micro.lengths)
        for start, end in zip(ends - micro.lengths, ends, strict=True):
            assert micro.positions[start:end].tolist() == list(range(end - start))
            if micro.ce_weight[start:end].any():
                samples.add((tuple(micro.token_ids[start:end]), tuple(micro.ce_weight[start:end])))
    expected = {
        (tuple(rows.token_ids[a:b]), tuple(rows.learned[a:b].astype(np.float32)))
        for a, b in zip(rows.starts, rows.starts[1:], strict=False)
        if rows.learned[a:b].any()
    }
    assert samples == expected


def test_rows_survive_their_file(tmp_path: Path) -> None:
    rows = _rows(10)
    rows.save(tmp_path / "rows")
    assert TokenRows.load(tmp_path / "rows").digest == rows.digest != _rows(10, seed=1).digest
