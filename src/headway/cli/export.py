"""`headway export`: a run's weights as a Hugging Face checkpoint."""

import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

from headway.base.errors import UsageError
from headway.cli.options import OptionParser

if TYPE_CHECKING:
    from headway.base.devices import Dtype
    from headway.config.trainer import TrainSettings
    from headway.core.runs import RunPaths

HELP = """\
usage: headway export RUN[@STEP] [OUT] [--dtype NAME] [--push OWNER/NAME [--private]]

Writes the weights of a run's checkpoint (the newest, or that of STEP) as a folder that transformers, vLLM and
`headway serve` load. Where an adapter was trained, OUT has it merged in, and OUT_adapter is the adapter alone in PEFT's
format. OUT is a folder, or a URL that fsspec knows, such as s3://bucket/my-model (with its package installed: s3fs).
Default: exports/step_NNNNNN in the run's folder.

  --dtype NAME       precision of the weights: bfloat16 or float32; default: that in which the run computed
  --push OWNER/NAME  upload it to the Hugging Face hub as this model, which is made where there is none; an adapter goes
                     to OWNER/NAME-adapter. Log in with `hf auth login`, or set HF_TOKEN. What is at OUT is not written
                     again
  --private          make the model private, where it is made

Examples:
  headway export outputs/my-run
  headway export outputs/my-run@100 my-model
  headway export outputs/my-run s3://bucket/my-model
  headway export outputs/my-run --push me/my-model --private
"""


def run(argv: list[str]) -> int:
    parser = OptionParser("export", push=str, private=False)
    parser.add_argument("--dtype", choices=("float32", "bfloat16"))
    parser.add_argument("run", metavar="RUN[@STEP]")
    parser.add_argument("out", metavar="OUT", nargs="?")
    options = parser.parse_args(argv)
    from headway.base.storage import is_url
    from headway.launch.fork import parse_checkpoint

    paths, step = parse_checkpoint(options.run)
    if options.out and is_url(options.out):
        if options.push:
            raise UsageError("--push uploads a folder here; give a folder as OUT, or none")
        _store(_settings(paths, options.dtype), paths, step, options.out)
        return 0
    out = Path(options.out) if options.out else paths.exports / f"step_{step:06d}"
    if not out.exists():
        from headway.trainer.exports import export_checkpoint

        print(export_checkpoint(_settings(paths, options.dtype), paths, step, out))
    elif not options.push:
        raise UsageError(f"{out} already exists; name another folder")
    if options.push:
        _push(out, options.push, options.private)
    return 0


def _store(settings: "TrainSettings", paths: "RunPaths", step: int, url: str) -> None:
    """Export to a folder that goes away, and copy that to `url`."""
    from headway.base.storage import Storage
    from headway.trainer.exports import export_checkpoint

    parent, _, name = url.rstrip("/").rpartition("/")
    storage = Storage(parent)
    if storage.read(f"{name}/config.json") is not None:
        raise UsageError(f"{url} already exists; name another place")
    with tempfile.TemporaryDirectory(prefix="headway-export-") as folder:
        export_checkpoint(settings, paths, step, Path(folder) / name)
        for made in sorted(Path(folder).iterdir()):
            storage.upload(made, made.name)
            print(f"{parent}/{made.name}")


def _settings(paths: "RunPaths", dtype: str | None) -> "TrainSettings":
    """The trainer's settings, of RL or of SFT, with the precision of the export."""
    from headway.config.loader import load_settings
    from headway.config.sft import SftSettings
    from headway.config.trainer import TrainSettings

    sft = paths.config / "sft.toml"
    kind, file = (SftSettings, sft) if sft.is_file() else (TrainSettings, paths.config / "trainer.toml")
    settings: TrainSettings = load_settings(kind, ["@", str(file)]).settings
    model = settings.model.model_copy(update={"dtype": dtype or _computed_in(settings, paths)})
    return settings.model_copy(update={"model": model})


def _computed_in(settings: "TrainSettings", paths: "RunPaths") -> "Dtype":
    """The precision in which the run computed: the export may be made where there is no GPU."""
    from headway.base.devices import resolve_dtype
    from headway.monitor.attempts import gpus_of

    device = settings.placement.device
    if device == "auto":
        device = "cuda" if gpus_of(paths) else "cpu"
    return resolve_dtype(settings.model.dtype, device)


def _push(folder: Path, repo: str, private: bool) -> None:
    from headway.base.hub import push

    print(push(folder, repo, private=private))
    adapter = folder.with_name(f"{folder.name}_adapter")
    if adapter.is_dir():
        print(push(adapter, f"{repo}-adapter", private=private))
