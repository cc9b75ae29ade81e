"""Rows of data: from JSONL and Parquet files, folders of them, and data sets of the Hugging Face hub."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from headway.base.errors import UsageError
from headway.base.extras import install_command
from headway.base.hub import download, parse_hub_id

SUFFIXES = (".jsonl", ".parquet")
DATA_FILES = [f"*{suffix}" for suffix in SUFFIXES]


@dataclass(frozen=True, slots=True)
class Row:
    """A row of `data` at `where` (file:line, or name:number). `error` says why a line can't be read. `folder` is that
    of its file: paths in the row are relative to it."""

    where: str
    data: dict[str, Any]
    error: str | None = None
    folder: Path = Path()


def read_rows(path: str, split: str = "train") -> Iterator[Row]:
    """Yield rows in file order. `path` is a file, a folder, or a data set's id on the hub, which may name a folder in
    it (owner/name/folder@revision). Raises UsageError if it is none."""
    if not path:
        raise UsageError("data.path is not set; give a JSONL or Parquet file, a folder of them, or a data set's hub id")
    local = Path(path).expanduser()
    if local.is_file():
        return _read_file(local)
    if local.is_dir():
        return (row for file in files_in(local, split) for row in _read_file(file))
    hub_id = None if local.suffix in SUFFIXES else parse_hub_id(path)
    if hub_id is None:
        raise UsageError(
            f"{path}: no such file; give a JSONL or Parquet file, a folder of them, or a data set's hub id"
        )
    folder = download(hub_id, "dataset", DATA_FILES) / hub_id.folder
    return (row for file in files_in(folder, split) for row in _read_file(file))


def files_in(folder: Path, split: str) -> list[Path]:
    """List the folder's data files by name; only those of `split` if file names begin with it."""
    files = sorted(file for file in folder.rglob("*") if file.suffix in SUFFIXES and file.is_file())
    if not files:
        raise UsageError(f"{folder}: holds no {' or '.join(SUFFIXES)} files")
    return [file for file in files if file.name.startswith(split)] or files


def _read_file(path: Path) -> Iterator[Row]:
    if path.suffix == ".parquet":
        return _read_parquet(path)
    return _read_jsonl(path)


def _read_jsonl(path: Path) -> Iterator[Row]:
    with path.open("rb") as file:
        for number, line in enumerate(file, 1):
            if line.strip():
                yield _parse(f"{path}:{number}", line, path.parent)


def _parse(where: str, line: bytes, folder: Path) -> Row:
    try:
        return Row(where, msgspec.json.decode(line, type=dict[str, Any]), folder=folder)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        return Row(where, {}, f"not a JSON object ({error})")


def _read_parquet(path: Path) -> Iterator[Row]:
    try:
        import pyarrow as arrow
        import pyarrow.parquet as parquet
    except ImportError:
        message = f"{path}: reading Parquet needs pyarrow: {install_command('data')}, or convert it to JSONL"
        raise UsageError(message) from None
    try:
        number = 0
        for batch in parquet.ParquetFile(path).iter_batches(1024):
            for data in batch.to_pylist():
                number += 1
                yield Row(f"{path}:{number}", data, folder=path.parent)
    except (arrow.ArrowInvalid, OSError) as error:
        raise UsageError(f"{path}: not a Parquet file ({error})") from None
