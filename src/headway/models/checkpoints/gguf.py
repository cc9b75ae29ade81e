"""GGUF files (llama.cpp's format) as checkpoint folders: config, dequantized tensors and tokenizer, checked on disk."""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import msgspec
import numpy as np
import torch
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors
from torch import Tensor

from headway.base.errors import HeadwayError, UsageError
from headway.base.extras import install_command
from headway.models.build import build_model
from headway.models.checkpoints.folders import read_tensors, save_checkpoint
from headway.models.checkpoints.tensors import load_hf_tensors
from headway.models.configs.config import ModelConfig
from headway.models.family import Family
from headway.models.registry import families, load_config

_OUTER = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
_INNER = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_BLOCK = re.compile(r"blk\.(\d+)\.(\w+)\.(weight|bias)")


class GgufSource:
    """Opens and checks the file. Raises UsageError where it is not a GGUF file of a family that is known."""

    def __init__(self, path: Path) -> None:
        try:
            import gguf
        except ImportError:
            raise UsageError(f"reading GGUF files needs the gguf package: {install_command('gguf')}") from None
        try:
            self._reader = gguf.GGUFReader(path)
        except FileNotFoundError:
            raise UsageError(f"{path} does not exist") from None
        except (ValueError, IndexError, OSError) as error:
            raise UsageError(f"{path} is no readable GGUF file ({error})") from None
        self._dequantize = gguf.dequantize
        self._tensors = {tensor.name: tensor for tensor in self._reader.tensors}
        self.architecture = str(self.get("general.architecture"))
        self.family = _family(self.architecture, path)
        if "rope_freqs.weight" in self._tensors:
            raise UsageError(f"{path}: it has its own rotary frequencies, which are not supported")
        self.config = self._config()

    def get(self, key: str, default: Any = None) -> Any:
        """Read the value of a metadata key; `{arch}` in it stands for the architecture."""
        if "{arch}" in key:
            key = key.replace("{arch}", self.architecture)
        field = self._reader.fields.get(key)
        return default if field is None else field.contents()

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Iterate over all tensors, in float32."""
        for name, stored in self._tensors.items():
            hf_name = hugging_face_name(name)
            values = torch.from_numpy(np.array(self._dequantize(stored.data, stored.tensor_type), dtype=np.float32))
            if self.family.gguf_interleaved_rotary and (heads := self._rotated_heads(name)):
                values = undo_rotary_order(values, heads)
            yield hf_name, values

    def _rotated_heads(self, name: str) -> int:
        """Count the heads of a query or key projection; 0 for other tensors."""
        if ".attn_q." in name:
            return self.config.heads
        return self.config.kv_heads if ".attn_k." in name else 0

    def _config(self) -> ModelConfig:
        width, heads = self._need("embedding_length"), self._need("attention.head_count")
        eos = [self.get(f"tokenizer.ggml.{kind}_token_id") for kind in ("eos", "eot")]
        return ModelConfig(
            family=self.family.model_type,
            vocab_size=int(self._tensors["token_embd.weight"].shape[1]),
            width=width,
            layers=self._need("block_count"),
            heads=heads,
            kv_heads=self.get("{arch}.attention.head_count_kv", heads),
            head_dim=self.get("{arch}.attention.key_length", width // heads),
            mlp_width=self._need("feed_forward_length"),
            rope_theta=_shortest(self.get("{arch}.rope.freq_base", 10_000.0)),
            norm_eps=_shortest(self._need("attention.layer_norm_rms_epsilon")),
            tied="output.weight" not in self._tensors,
            max_len=self._need("context_length"),
            attention_bias="blk.0.attn_q.bias" in self._tensors,
            bos_id=self.get("tokenizer.ggml.bos_token_id"),
            eos_ids=tuple(dict.fromkeys(token for token in eos if token is not None)),
            pad_id=self.get("tokenizer.ggml.padding_token_id"),
        )

    def _need(self, key: str) -> Any:
        value = self.get(f"{{arch}}.{key}")
        if value is None:
            raise HeadwayError(f"the GGUF file lacks {self.architecture}.{key}")
        return value


def _family(architecture: str, path: Path) -> Family:
    known = {family.gguf_architecture: family for family in families() if family.gguf_architecture}
    if architecture not in known:
        raise UsageError(f"{path}: architecture {architecture!r} is not supported (known: {', '.join(known)})")
    return known[architecture]


def hugging_face_name(name: str) -> str:
    """Translate a tensor's name. Raises HeadwayError for one that has no counterpart."""
    if name in _OUTER:
        return _OUTER[name]
    if (match := _BLOCK.fullmatch(name)) and match[2] in _INNER:
        return f"model.layers.{match[1]}.{_INNER[match[2]]}.{match[3]}"
    raise HeadwayError(f"the GGUF file has an unknown tensor: {name}")


def undo_rotary_order(rows: Tensor, heads: int) -> Tensor:
    """llama.cpp stores the two halves of each rotary head interleaved; put them one after the other again."""
    return rows.view(heads, -1, 2, *rows.shape[1:]).transpose(1, 2).reshape(rows.shape)


def _shortest(value: float) -> float:
    """Round to the shortest decimal: GGUF stores float32, and 1e-5 must not become 9.99999974e-06."""
    return float(str(np.float32(value)))


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


_PROBE = "Hello, world! 12345 naïve 東京 🙂\n\tdef f(x): return x"


@dataclass(frozen=True, slots=True)
class Converted:
    family: str
    tensors: int
    parameters: int


def convert_gguf(path: Path, folder: Path, *, dtype: torch.dtype = torch.float32) -> Converted:
    """Write `folder` (whole or not at all) and compare what is then on disk with the GGUF file, value by value."""
    source = GgufSource(path)
    model = build_model(source.config, dtype=dtype, seed=None)
    load_hf_tensors(model, source.tensors())
    with TemporaryDirectory() as files:
        save_tokenizer(source, Path(files))
        save_checkpoint(model, folder, files_from=Path(files))
    del model
    return back_check(source, folder, dtype)


def back_check(source: GgufSource, folder: Path, dtype: torch.dtype) -> Converted:
    """Compare `folder` with the GGUF file. Raises HeadwayError that names the first difference."""
    if load_config(folder) != source.config:
        raise HeadwayError(f"{folder}: config.json differs from the GGUF file")
    written = dict(read_tensors(folder))
    parameters = tensors = 0
    for name, values in source.tensors():
        if name not in written or not torch.equal(written[name], values.to(dtype)):
            raise HeadwayError(f"{folder}: {name} differs from the GGUF file")
        parameters += values.numel()
        tensors += 1
    if tensors != len(written):
        raise HeadwayError(f"{folder}: {len(written)} tensors were written, the GGUF file has {tensors}")
    saved = Tokenizer.from_file(str(folder / "tokenizer.json"))
    if saved.encode(_PROBE).ids != build_tokenizer(source).encode(_PROBE).ids:
        raise HeadwayError(f"{folder}: the tokenizer splits text differently than the GGUF file's")
    return Converted(source.config.family, tensors, parameters)
