"""`headway export`: a run's weights as a Hugging Face checkpoint."""

from pathlib import Path
from typing import TYPE_CHECKING

from headway.cli.options import OptionParser
from headway.core.errors import UsageError

if TYPE_CHECKING:
    from headway.config.trainer import TrainSettings
    from headway.core.runs import RunPaths

HELP = """\
usage: headway export RUN[@STEP] [OUT] [--push OWNER/NAME [--private]]

Writes the weights of a run's checkpoint (the newest, or that of STEP) as a folder that transformers, vLLM and
`headway serve` load. Where an adapter was trained, OUT has it merged in, and OUT_adapter is the adapter alone in PEFT's
format. Default OUT: exports/step_NNNNNN in the run's folder.

  --push OWNER/NAME  upload it to the Hugging Face hub as this model, which is made where there is none; an adapter goes
                     to OWNER/NAME-adapter. Log in with `hf auth login`, or set HF_TOKEN. What is at OUT is not written
                     again
  --private          make the model private, where it is made

Examples:
  headway export outputs/my-run
  headway export outputs/my-run@100 my-model
  headway export outputs/my-run --push me/my-model --private
"""


def run(argv: list[str]) -> int:
    parser = OptionParser("export", push=str, private=False)
    parser.add_argument("run", metavar="RUN[@STEP]")
    parser.add_argument("out", type=Path, metavar="OUT", nargs="?")
    options = parser.parse_args(argv)
    from headway.launch.fork import parse_checkpoint

    paths, step = parse_checkpoint(options.run)
    out = options.out or paths.exports / f"step_{step:06d}"
    if not out.exists():
        from headway.trainer.exports import export_checkpoint

        print(export_checkpoint(_settings(paths), paths, step, out))
    elif not options.push:
        raise UsageError(f"{out} already exists; name another folder")
    if options.push:
        _push(out, options.push, options.private)
    return 0


def _settings(paths: "RunPaths") -> "TrainSettings":
    """The trainer's settings, of RL or of SFT."""
    from headway.config.loader import load_settings
    from headway.config.sft import SftSettings
    from headway.config.trainer import TrainSettings

    sft = paths.config / "sft.toml"
    if sft.is_file():
        return load_settings(SftSettings, ["@", str(sft)]).settings
    return load_settings(TrainSettings, ["@", str(paths.config / "trainer.toml")]).settings


def _push(folder: Path, repo: str, private: bool) -> None:
    from headway.core.hub import push

    print(push(folder, repo, private=private))
    adapter = folder.with_name(f"{folder.name}_adapter")
    if adapter.is_dir():
        print(push(adapter, f"{repo}-adapter", private=private))
