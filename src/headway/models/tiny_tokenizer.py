"""The tokenizer of the built-in tiny models: bytes, ChatML's special tokens, and a chat template.

Ids 0 to 255 are the bytes themselves, so that a character is one token and a small model can learn to spell.
"""

import json
from pathlib import Path

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from headway.base.files import write_atomic

SPECIALS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
VISION = ("<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>")
"""More special tokens, of the models that see."""
MARKS = ("<think>", "</think>", "<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>")
ROLES = ("system\n", "user\n", "assistant\n", "tool\n")

TEMPLATE_MARK = "{#- headway chatml -#}"
"""A template that starts with this is the one that `chatml.ChatMLRenderer` renders natively."""

CHAT_TEMPLATE = Path(__file__).with_name("tiny_chat_template.jinja").read_text()


def byte_characters() -> list[str]:
    """The printable character that byte-level tokenizers write for each byte, by byte value."""
    printable = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    shifted = iter(range(256, 512))
    return [chr(byte if byte in printable else next(shifted)) for byte in range(256)]


def tiny_tokenizer(*, vision: bool = False) -> Tokenizer:
    vocab = {character: byte for byte, character in enumerate(byte_characters())}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in SPECIALS])
    tokenizer.add_tokens([AddedToken(text, special=False, normalized=False) for text in (*MARKS, *ROLES)])
    if vision:
        tokenizer.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in VISION])
    return tokenizer


def save_tiny_tokenizer(folder: Path, *, vision: bool = False) -> int:
    """Write tokenizer.json and tokenizer_config.json into `folder`; returns the size of the vocabulary."""
    tokenizer = tiny_tokenizer(vision=vision)
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": "<|im_end|>",
        "pad_token": "<|endoftext|>",
        "clean_up_tokenization_spaces": False,
        "chat_template": CHAT_TEMPLATE,
    }
    write_atomic(Path(folder) / "tokenizer.json", tokenizer.to_str(pretty=True))
    write_atomic(Path(folder) / "tokenizer_config.json", json.dumps(config, indent=2, ensure_ascii=False))
    return tokenizer.get_vocab_size()
