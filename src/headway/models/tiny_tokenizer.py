"""The tokenizer of the built-in tiny models: bytes, the marks of ChatML, and a template that says so.

Ids 0 to 255 are the bytes themselves, so that a character is one token and a small model can learn to spell.
"""

import json
from pathlib import Path

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from headway.core.files import write_atomic

SPECIALS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
MARKS = ("<think>", "</think>", "<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>")
ROLES = ("system\n", "user\n", "assistant\n", "tool\n")

TEMPLATE_MARK = "{#- headway chatml -#}"
"""A template that starts with this is the one that `chatml.ChatMLRenderer` renders natively."""

CHAT_TEMPLATE = (
    TEMPLATE_MARK
    + r"""
{%- set first = messages[0] if messages and messages[0].role == 'system' else none %}
{%- if tools or first %}
    {{- '<|im_start|>system\n' }}
    {{- first.content if first else '' }}
    {%- if tools %}
        {{- '\n' if first and first.content else '' }}
        {{- '<tools>' }}
        {%- for tool in tools %}
            {%- set schema = tool.function.parameters or {} %}
            {{- '\n' + tool.function.name + '(' }}
            {%- for name, kind in (schema.properties or {}).items() %}
                {{- name + ('' if name in (schema.required or []) else '?') + ': ' }}
                {{- kind.enum | join('|') if kind.enum else kind.type or 'any' }}{{ '' if loop.last else ', ' }}
            {%- endfor %}
            {{- ')' + (' ' + tool.function.description if tool.function.description else '') }}
        {%- endfor %}
        {{- '\n</tools>\nCall one: <tool_call>\n{"name": ..., "arguments": {...}}\n</tool_call>' }}
    {%- endif %}
    {{- '<|im_end|>\n' }}
{%- endif %}
{%- for message in messages %}
    {%- if message.role == 'tool' %}
        {%- if loop.first or messages[loop.index0 - 1].role != 'tool' %}{{ '<|im_start|>user' }}{% endif %}
        {{- '\n<tool_response>\n' + message.content + '\n</tool_response>' }}
        {%- if loop.last or messages[loop.index0 + 1].role != 'tool' %}{{ '<|im_end|>\n' }}{% endif %}
    {%- elif message.role == 'assistant' %}
        {{- '<|im_start|>assistant\n' }}
        {%- if message.reasoning_content is string %}
            {{- '<think>\n' + message.reasoning_content + '\n</think>\n\n' }}
        {%- endif %}
        {{- message.content or '' }}
        {%- for call in message.tool_calls or [] %}
            {{- '\n' if message.content or not loop.first else '' }}
            {{- '<tool_call>\n{"name": ' + (call.function.name | tojson) + ', "arguments": ' }}
            {{- call.function.arguments if call.function.arguments is string else call.function.arguments | tojson }}
            {{- '}\n</tool_call>' }}
        {%- endfor %}
        {{- '<|im_end|>\n' }}
    {%- elif not (loop.first and first) %}
        {{- '<|im_start|>' + message.role + '\n' + message.content + '<|im_end|>\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}
"""
)


def byte_characters() -> list[str]:
    """The printable character that byte-level tokenizers write for each byte, by byte value."""
    printable = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    shifted = iter(range(256, 512))
    return [chr(byte if byte in printable else next(shifted)) for byte in range(256)]


def tiny_tokenizer() -> Tokenizer:
    vocab = {character: byte for byte, character in enumerate(byte_characters())}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in SPECIALS])
    tokenizer.add_tokens([AddedToken(text, special=False, normalized=False) for text in (*MARKS, *ROLES)])
    return tokenizer


def save_tiny_tokenizer(folder: Path) -> int:
    """Write tokenizer.json and tokenizer_config.json into `folder`; returns the size of the vocabulary."""
    tokenizer = tiny_tokenizer()
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
