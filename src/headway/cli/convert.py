"""`headway convert`: a GGUF file becomes a checkpoint folder."""

import argparse
import time
from pathlib import Path

from headway.core.errors import UsageError


def run(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(
        prog="headway convert",
        description="Turn a GGUF file (families llama and qwen3, any quantization) into a Hugging Face checkpoint "
        "folder with weights, config, tokenizer and chat template, and check it against the file.",
    )
    parser.add_argument("file", type=Path, metavar="MODEL.gguf")
    parser.add_argument("folder", type=Path, metavar="OUT", help="must not exist, or be empty")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32", help="of the written weights")
    args = parser.parse_args(argv)
    if args.folder.exists() and (not args.folder.is_dir() or any(args.folder.iterdir())):
        raise UsageError(f"{args.folder} is in the way; choose a folder that does not exist yet")

    import torch

    from headway.models.checkpoints.gguf.convert import convert_gguf

    started = time.monotonic()
    done = convert_gguf(args.file, args.folder, dtype=getattr(torch, args.dtype))
    seconds = time.monotonic() - started
    print(
        f"{args.folder}: {done.family}, {done.parameters:,} parameters in {done.tensors} tensors, "
        f"{args.dtype}, checked against the file ({seconds:.0f} s)"
    )
    return 0
