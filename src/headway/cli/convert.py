"""`headway convert`: a GGUF file becomes a checkpoint folder."""

import time
from pathlib import Path

from headway.base.errors import UsageError
from headway.cli.options import OptionParser

HELP = """\
usage: headway convert MODEL.gguf OUT [--dtype float32|bfloat16]

Turns a GGUF file (families llama and qwen3, any quantization) into a Hugging Face checkpoint folder with weights,
config, tokenizer and chat template, and checks it against the file.

  OUT            must not exist, or be empty
  --dtype DTYPE  of the written weights (float32)

Example:
  headway convert my-model.gguf checkpoints/my-model --dtype bfloat16
"""


def run(argv: list[str]) -> int:
    parser = OptionParser("convert")
    parser.add_argument("file", type=Path, metavar="MODEL.gguf")
    parser.add_argument("folder", type=Path, metavar="OUT")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    options = parser.parse_args(argv)
    if options.folder.exists() and (not options.folder.is_dir() or any(options.folder.iterdir())):
        raise UsageError(f"{options.folder} already exists; choose a folder that does not exist yet")

    import torch

    from headway.models.checkpoints.gguf import convert_gguf

    started = time.monotonic()
    done = convert_gguf(options.file, options.folder, dtype=getattr(torch, options.dtype))
    seconds = time.monotonic() - started
    print(
        f"{options.folder}: {done.family}, {done.parameters:,} parameters in {done.tensors} tensors, "
        f"{options.dtype}, checked against the file ({seconds:.0f} s)"
    )
    return 0
