"""`headway replay`: a run again from its journal, exactly, explained, or with changed settings."""

from pathlib import Path

from headway.base.errors import UsageError
from headway.cli.options import OptionParser, split_settings

HELP = """\
usage: headway replay RUN [--from-step N] [--to-step M] [--no-train]
       headway replay RUN --step S --why
       headway replay RUN [--from-step N] --section.setting VALUE ...

Repeats a run from its journal and its recorded rollouts, without engines and environments: the orchestrator decides
again what it decided, and the trainer trains the batches that come of it. Says for every step whether the batch and
the weights after it are bit-identical with the run's. The run may be going on; nothing in its folder changes.

  --from-step N     train on from the checkpoint of step N; decisions are replayed from the start all the same. The last
                    two checkpoints are there; trainer.checkpoints.keep_interval keeps more
  --to-step M       stop after step M
  --no-train        replay the decisions alone, and compare batches
  --step S --why    explain step S: the groups of its batch and their age, what was dropped and why, who waited
  --a.b.c VALUE     train the recorded rollouts with other settings, as a new run beside this one: those of the trainer,
                    and the orchestrator's algorithm, filters and gates

Exits with 0 if nothing differs, else with 1. What it needs and where it ends: docs/replay.md.

Examples:
  headway replay outputs/my-run
  headway replay outputs/my-run --from-step 40 --to-step 50
  headway replay outputs/my-run --step 37 --why
  headway replay outputs/my-run --from-step 40 --trainer.loss.type gspo
"""


def run(argv: list[str]) -> int:
    from headway.monitor.runs import open_run
    from headway.replay.changed import replay_changed
    from headway.replay.command import replay_run, summary
    from headway.replay.lives import read_history
    from headway.replay.why import explain_step

    parser = OptionParser("replay", from_step=int, to_step=int, no_train=False, step=int, why=False)
    parser.add_argument("run", type=Path)
    own, changes = split_settings(argv)
    options = parser.parse_args(own)
    if options.why != (options.step is not None):
        raise UsageError("--step S and --why go together: they explain one step")
    paths = open_run(options.run)
    history = read_history(paths)
    if history.journal.torn:
        _say(f"the journal is torn, or being written, after {history.journal.size:,} bytes: this ends there")
    if options.why:
        print(*explain_step(paths, history, options.step), sep="\n")
        return 0
    if changes:
        replay_changed(paths, history, changes, _say, options.from_step, options.to_step)
        return 0
    train = not options.no_train
    found = replay_run(paths, history, _say, from_step=options.from_step, to_step=options.to_step, train=train)
    for line in summary(found, history.steps[-1]):
        _say(line)
    return 0 if found.identical else 1


def _say(line: str) -> None:
    print(line, flush=True)
