"""`headway plan`: what a run would need, take and cost, before anything is paid for."""

import sys
from pathlib import Path
from typing import TYPE_CHECKING

from headway.base.errors import UsageError
from headway.base.files import write_atomic
from headway.cli.options import OptionParser, split_settings

if TYPE_CHECKING:
    from argparse import Namespace

    from headway.config.rl import RlSettings
    from headway.core.runs import RunPaths
    from headway.plan.episodes import Workload
    from headway.plan.planning import Question

HELP = """\
usage: headway plan @ CONFIG.toml [--gpus N] [--gpu NAME] [--from RUN] [--section.setting VALUE ...]
       headway plan RUN [--gpu NAME] [--section.setting VALUE ...]
       headway plan --calibrate @ CONFIG.toml

Predicts a run before it is paid for: memory per rank, the time and money of a step, the split of devices between
trainer and engines that finishes first and the one that costs least, the lag, the first bottleneck, and what other
settings would change. The orchestrator's own code decides, on simulated time. Speeds are those that were measured on
this machine, once for every model, or with --gpu those of a known GPU by formula. Predictions, not promises: every
assumption is printed. How far to trust them: docs/plan.md.

With RUN: how that run should have been laid out, from its records; its measured step time stands beside the predicted.

  --gpus N              how many GPUs there are; every split of them that fits is looked at
  --gpu NAME            which: h200, h100, a100, b200, l40s, ... With RUN, those that it ran on
  --from RUN            take episodes as long as those that this run has recorded
  --calibrate           measure this machine (again), in two minutes at the most; do that while nothing else runs
  --json                print the plan as JSON
  --picture FILE.svg    also draw it: memory of a GPU, who works and waits in a step, other layouts and settings
  --prompt-tokens N     tokens that are read before each reply
  --reply-tokens N      tokens of a reply, on the mean
  --reply-spread S      standard deviation of their logarithm: 0 for all the same, 1 for a long tail
  --turns N             replies of an episode
  --turn-seconds S      what the environment takes after each reply, on the mean
  --turn-spread S       standard deviation of its logarithm
  --useful-share S      share of the groups that filters leave
  @ FILE, --a.b.c V     settings, as of `headway rl`

Examples:
  headway plan @ examples/reverse_text/rl.toml
  headway plan @ rl.toml --gpus 64 --gpu h200 --prompt-tokens 2000 --reply-tokens 6000 --reply-spread 0.8
  headway plan @ rl.toml --gpus 64 --gpu h200 --from outputs/my-run --orchestrator.max_lag 2
  headway plan @ rl.toml --gpus 64 --gpu h200 --reply-tokens 4000 --picture plan.svg
  headway plan outputs/my-run
"""


def run(argv: list[str]) -> int:
    import msgspec

    from headway.plan.picture import plan_picture
    from headway.plan.planning import make_plan
    from headway.plan.report import plan_lines

    parser = OptionParser(
        "plan", gpus=int, gpu=str, json=False, picture=Path, calibrate=False, prompt_tokens=int, reply_tokens=float,
        reply_spread=float, turns=int, turn_seconds=float, turn_spread=float, useful_share=float,
    )  # fmt: skip
    parser.add_argument("--from", dest="origin", type=Path)
    parser.add_argument("run", type=Path, nargs="?")
    own, layers = split_settings(argv)
    options = parser.parse_args(own)
    if options.picture and options.picture.suffix != ".svg":
        raise UsageError(f"--picture draws an SVG file; give it a name that ends in .svg (got {options.picture})")
    plan = make_plan(_question(options, layers))
    if options.json:
        print(msgspec.json.encode(plan).decode())
    else:
        print(*plan_lines(plan), sep="\n")
    if options.picture:
        write_atomic(options.picture, plan_picture(plan))
        _say(f"drawn in {options.picture}")
    return 0


def _question(options: "Namespace", argv: list[str]) -> "Question":
    from headway.config.loader import load_settings
    from headway.config.rl import RlSettings
    from headway.monitor.runs import open_run
    from headway.plan.command import ask_for_gpus, ask_for_this_machine, gpu_here
    from headway.plan.fitting import measured

    past = open_run(options.run) if options.run else None
    if past is not None:
        argv = ["@", str(past.config / "rl.toml"), *argv]
    settings = load_settings(RlSettings, argv).settings
    if options.gpus is not None and options.gpus < 2:
        raise UsageError(f"--gpus must be 2 at least, one to train and one to serve (got {options.gpus})")
    name = options.gpu or (gpu_here() if options.gpus is not None else None)
    if options.gpus is not None and name is None:
        from headway.base.gpus import GPUS

        raise UsageError(f"--gpus needs --gpu, since this machine has none that is known; known are {', '.join(GPUS)}")
    workload = _workload(options, settings, past)
    seen = measured(past) if past is not None else None
    if name is not None:
        return ask_for_gpus(settings, workload, name, options.gpus, seen)
    return ask_for_this_machine(settings, workload, _say, seen, again=options.calibrate)


def _workload(options: "Namespace", settings: "RlSettings", past: "RunPaths | None") -> "Workload":
    from headway.monitor.runs import open_run
    from headway.plan.command import default_figures
    from headway.plan.episodes import FLAGS, recorded_workload

    found = {name: getattr(options, flag[2:].replace("-", "_")) for name, flag in FLAGS.items()}
    given = {name: value for name, value in found.items() if value is not None}
    record = open_run(options.origin) if options.origin else past
    if record is not None:
        if given:
            raise UsageError(
                "episodes come from a run's records or from figures such as --reply-tokens; give one of them"
            )
        return recorded_workload(record)
    figures = default_figures(settings)
    origin = "as given" if "reply" in given else "nothing is known of them; give --from RUN or --reply-tokens"
    return figures.changed(given).workload(settings.seq_len, origin, settings.seed)


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)
