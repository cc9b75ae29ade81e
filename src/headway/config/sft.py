"""Settings of supervised fine-tuning."""

from pathlib import Path
from typing import Literal

from pydantic import Field

from headway.config.base import Settings
from headway.config.trainer import TrainSettings


class DataSettings(Settings):
    path: str = ""
    """A JSONL or Parquet file, a folder of them, or a data set of the Hugging Face hub as owner/name, owner/name/folder
    or owner/name@revision (docs/hub.md)."""
    split: str = "train"
    """Of a folder or data set, only files whose names begin with this, where there are any."""
    validation_path: Path | None = None
    """Held-out rows. Default: none."""
    max_bad_rows: int = Field(default=100, ge=0)
    """Broken rows are counted and skipped up to this many."""
    shuffle: bool = True
    """Draw rows in a random order, a new one each epoch."""
    train_roles: list[str] = ["assistant"]
    """Roles whose tokens are learned."""
    too_long: Literal["truncate", "drop"] = "truncate"
    """What to do with rows longer than seq_len."""


class SftSettings(TrainSettings):
    """Settings of `headway sft`."""

    data: DataSettings = DataSettings()
    """What is learned from."""
    batch_tokens: int = Field(default=8192, ge=1)
    """Tokens per optimizer step, over all ranks."""
    validation_interval: int = Field(default=50, ge=1)
    """Steps between two passes over the held-out rows."""
