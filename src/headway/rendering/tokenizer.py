"""A checkpoint's tokenizer and chat template, read from its folder without the transformers package."""

import hashlib
import json
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from headway.base.errors import HeadwayError


def load_tokenizer(folder: Path) -> Tokenizer:
    """Load the fast tokenizer of `folder`. Raises HeadwayError where there is none or it cannot be read."""
    file = Path(folder) / "tokenizer.json"
    if not file.is_file():
        raise HeadwayError(f"{folder} has no tokenizer.json; point at a checkpoint folder with a fast tokenizer")
    try:
        return Tokenizer.from_file(str(file))
    except Exception as error:  # the Rust side raises bare Exception on a broken file
        raise HeadwayError(f"{file} is not a tokenizer: {error}") from error


def tokenizer_fingerprint(folder: Path) -> str:
    """Return a digest of the tokenizer in `folder`: equal for those that give equal ids to equal pieces."""
    vocabulary = sorted(load_tokenizer(folder).get_vocab(with_added_tokens=True).items())
    return hashlib.sha256(json.dumps(vocabulary).encode()).hexdigest()[:16]


def load_tokenizer_config(folder: Path) -> dict[str, Any]:
    """Read `tokenizer_config.json`; an empty dict where the checkpoint has none."""
    file = Path(folder) / "tokenizer_config.json"
    if not file.is_file():
        return {}
    try:
        config = json.loads(file.read_text())
    except ValueError as error:
        raise HeadwayError(f"{file} is not JSON: {error}") from error
    return config if isinstance(config, dict) else {}


def load_chat_template(folder: Path) -> str | None:
    """Read the checkpoint's Jinja chat template: `chat_template.jinja`, else the one in `tokenizer_config.json`."""
    file = Path(folder) / "chat_template.jinja"
    if file.is_file():
        return file.read_text()
    template = load_tokenizer_config(folder).get("chat_template")
    if isinstance(template, list):  # several named templates
        named = {entry["name"]: entry["template"] for entry in template}
        template = named.get("default") or next(iter(named.values()), None)
    return template if isinstance(template, str) else None


def special_token(config: dict[str, Any], name: str) -> str | None:
    """Read the text of a special token such as `eos_token`, which checkpoints write as text or as an object."""
    token = config.get(name)
    if isinstance(token, dict):
        token = token.get("content")
    return token if isinstance(token, str) else None
