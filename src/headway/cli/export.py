"""`headway export`: a run's weights as a Hugging Face checkpoint."""

from pathlib import Path

from headway.cli.options import OptionParser
from headway.core.errors import UsageError

HELP = """\
usage: headway export RUN[@STEP] [OUT]

Writes the weights of a run's checkpoint (the newest, or that of STEP) as a folder that transformers, vLLM and
`headway serve` load. Where an adapter was trained, OUT has it merged in, and OUT_adapter is the adapter alone in PEFT's
format. Default OUT: exports/step_NNNNNN in the run's folder.

Examples:
  headway export outputs/my-run
  headway export outputs/my-run@100 my-model
"""


def run(argv: list[str]) -> int:
    parser = OptionParser("export")
    parser.add_argument("run", metavar="RUN[@STEP]")
    parser.add_argument("out", type=Path, metavar="OUT", nargs="?")
    options = parser.parse_args(argv)
    from headway.config.loader import load_settings
    from headway.config.trainer import TrainSettings
    from headway.launch.fork import parse_checkpoint

    paths, step = parse_checkpoint(options.run)
    out = options.out or paths.exports / f"step_{step:06d}"
    if out.exists():
        raise UsageError(f"{out} already exists; name another folder")
    settings = load_settings(TrainSettings, ["@", str(paths.config / "trainer.toml")]).settings
    from headway.trainer.exports import export_checkpoint

    print(export_checkpoint(settings, paths, step, out))
    return 0
