"""`headway train`: the trainer of a run, by itself."""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from headway.config.trainer import TrainSettings
    from headway.core.runs import RunPaths

HELP = """\
usage: headway train @ TRAINER.toml [@ MORE.toml ...] [--section.setting VALUE ...]

Runs the trainer of a run: waits for batches, trains, publishes weights, writes checkpoints. `headway rl` starts it for
you; by itself it joins the run named by run.name, or makes one. Continues from the newest complete checkpoint.
With placement.trainer_ranks above 1 it starts that many ranks on this machine. Ctrl-C finishes the step, writes a
checkpoint and exits.

  @ FILE            a layer of settings; later layers and flags win
  --a.b.c VALUE     one setting (`headway config docs` lists all)
  --dry-run         write the resolved settings and exit

Examples:
  headway train @ outputs/my-run/config/trainer.toml
  headway train --model.path tiny --trainer.fake_data.micro_batches 2 --max_steps 10
  headway train --model.path tiny-moe --placement.trainer_ranks 2 --trainer.fake_data.mean_len 200 --max_steps 5
"""


def run(argv: list[str]) -> int:
    from headway.config.loader import load_settings
    from headway.config.trainer import TrainSettings
    from headway.monitor.dry_run import write_dry_run
    from headway.monitor.runs import join_run

    resolved = load_settings(TrainSettings, argv)
    settings = resolved.settings
    if resolved.dry_run:
        print(*write_dry_run(settings, "train"), sep="\n")
        return 0
    paths = join_run(settings.run, "train")
    if (code := run_ranks("train", argv, settings, paths)) is not None:
        return code
    from headway.trainer.rl import train

    train(settings, paths)
    return 0


def run_ranks(command: str, argv: list[str], settings: "TrainSettings", paths: "RunPaths") -> int | None:
    """Run `headway command *argv` as a group of ranks where there are several, and return its exit code.

    Returns None where this process is a rank itself, after setting up its logging.
    """
    from headway.monitor.logs import setup_logging
    from headway.trainer.parallel.group import in_group, rank_in_group, run_group

    ranks = settings.placement.trainer_ranks
    if ranks > 1 and not in_group():
        return run_group(ranks, [command, *argv, *run_flags(paths)])
    process = "trainer" if rank_in_group() == 0 else f"trainer-{rank_in_group()}"
    setup_logging(process, paths, json=settings.log.json_lines, level=settings.log.level)
    return None


def run_flags(paths: "RunPaths") -> list[str]:
    """Return the flags that make a command join this run instead of making one."""
    return ["--run.name", paths.root.name, "--run.output_dir", str(paths.root.parent)]
