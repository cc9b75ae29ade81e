"""A GGUF file's byte-level BPE tokenizer as tokenizer.json, with its chat template and special tokens."""

from pathlib import Path
from typing import Any

import msgspec
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

from headway.core.errors import UsageError
from headway.models.checkpoints.gguf.source import GgufSource

_CONTROL, _USER_DEFINED = 3, 4
_WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}%s| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_DIGITS_TOGETHER = {"llama-bpe": "{1,3}", "qwen2": ""}
_PLAIN = ("default", "gpt-2")


def save_tokenizer(source: GgufSource, folder: Path) -> None:
    """Write tokenizer.json and tokenizer_config.json. Raises UsageError for kinds that are not supported."""
    tokenizer = build_tokenizer(source)
    tokenizer.save(str(folder / "tokenizer.json"))
    tokens = source.get("tokenizer.ggml.tokens")
    config: dict[str, Any] = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": source.config.max_len,
        "clean_up_tokenization_spaces": False,
    }
    for ours, theirs in (("bos", "bos"), ("eos", "eos"), ("pad", "padding"), ("unk", "unknown")):
        token_id = source.get(f"tokenizer.ggml.{theirs}_token_id")
        if token_id is not None:
            config[f"{ours}_token"] = tokens[token_id]
    if template := source.get("tokenizer.chat_template"):
        config["chat_template"] = template
    (folder / "tokenizer_config.json").write_bytes(msgspec.json.format(msgspec.json.encode(config), indent=2))


def build_tokenizer(source: GgufSource) -> Tokenizer:
    kind = source.get("tokenizer.ggml.model")
    if kind != "gpt2":
        raise UsageError(f"tokenizer model {kind!r} is not supported (only byte-level BPE, which GGUF calls gpt2)")
    tokens = source.get("tokenizer.ggml.tokens")
    merges = [tuple(merge.split(" ", 1)) for merge in source.get("tokenizer.ggml.merges")]
    tokenizer = Tokenizer(models.BPE(vocab={token: i for i, token in enumerate(tokens)}, merges=merges))
    split = source.get("tokenizer.ggml.pre", "default")
    tokenizer.pre_tokenizer = _pre_tokenizer(split)
    if split == "qwen2":
        tokenizer.normalizer = normalizers.NFC()
    tokenizer.decoder = decoders.ByteLevel()
    types = source.get("tokenizer.ggml.token_type")
    for wanted, special in ((_CONTROL, True), (_USER_DEFINED, False)):
        added = [token for token, kind in zip(tokens, types, strict=True) if kind == wanted]
        tokenizer.add_tokens([AddedToken(token, special=special, normalized=False) for token in added])
    bos = source.get("tokenizer.ggml.bos_token_id")
    if source.get("tokenizer.ggml.add_bos_token", False) and bos is not None:
        tokenizer.post_processor = processors.TemplateProcessing(
            single=f"{tokens[bos]} $A", special_tokens=[(tokens[bos], bos)]
        )
    return tokenizer


def _pre_tokenizer(split: str) -> pre_tokenizers.PreTokenizer:
    """Build the pre-tokenizer, which splits text before merging, by llama.cpp's name for it."""
    if split in _DIGITS_TOGETHER:
        words = pre_tokenizers.Split(Regex(_WORDS % _DIGITS_TOGETHER[split]), "isolated")
        return pre_tokenizers.Sequence([words, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])
    if split == "smollm":
        digits = pre_tokenizers.Digits(individual_digits=True)
        return pre_tokenizers.Sequence([digits, pre_tokenizers.ByteLevel(add_prefix_space=False)])
    if split in _PLAIN:
        return pre_tokenizers.ByteLevel(add_prefix_space=False)
    known = ", ".join([*_PLAIN, "smollm", *_DIGITS_TOGETHER])
    raise UsageError(f"pre-tokenizer {split!r} is not supported (known: {known})")
