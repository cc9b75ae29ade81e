"""`headway train`: the trainer of a run, by itself."""

from typing import TYPE_CHECKING

from headway.base.errors import STOPPED, UsageError
from headway.cli.options import OptionParser
from headway.launch.joining import run_flags

if TYPE_CHECKING:
    from headway.config.trainer import TrainSettings
    from headway.core.runs import RunPaths

HELP = """\
usage: headway train @ TRAINER.toml [@ MORE.toml ...] [--section.setting VALUE ...]
       headway train --run URL [--restart | --hosts N] [--section.setting VALUE ...]

Runs the trainer of a run: waits for batches, trains, publishes weights, writes checkpoints. `headway rl` starts it for
you; by itself it joins the run named by run.name, or makes one. Continues from the newest complete checkpoint.
With placement.trainer_ranks above 1 it starts that many ranks on this machine. Ctrl-C finishes the step, writes a
checkpoint and exits.

  --run URL         be the trainer of a run on another host: settings come from there, files stay in a folder here; the
                    run's token is read from HEADWAY_TOKEN or from the file that HEADWAY_TOKEN_FILE names
  --restart         with --run: start it again when it dies, as `headway rl` does
  --hosts N         with --run: be one of N hosts that share the ranks evenly; the run tells them where to meet, and
                    starts all again when one is lost. With MIN:N they go on as fewer, when no other came for 30 s
  --at-host         let the host train that the run joined with `headway rl --host`, which starts it so
  @ FILE            a layer of settings; later layers and flags win
  --a.b.c VALUE     one setting (`headway config docs` lists all)
  --dry-run         write the resolved settings, say what each rank would hold and send, and exit

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

    options, argv = OptionParser("train", run=str, restart=False, hosts=str, at_host=False).parse_known_args(argv)
    if options.run:
        return _train_elsewhere(options.run, argv, restart=options.restart, hosts=options.hosts)
    if options.restart or options.hosts:
        raise UsageError("--restart and --hosts go with --run URL; `headway rl` restarts what it starts")
    resolved = load_settings(TrainSettings, argv)
    settings = resolved.settings
    if resolved.dry_run:
        print(*write_dry_run(settings, "train"), sep="\n")
        print(_layout(settings))
        return 0
    paths = join_run(settings.run, "train")
    if options.at_host:
        return _train_at_host(settings, paths)
    if (code := run_ranks("train", argv, settings, paths)) is not None:
        return code
    from headway.trainer.rl import train

    return 0 if train(settings, paths) else STOPPED


def _train_at_host(settings: "TrainSettings", paths: "RunPaths") -> int:
    from headway.monitor.logs import setup_logging
    from headway.transport.tenants.tenancy import read_tenancy

    tenancy = read_tenancy(paths)
    if tenancy is None:
        raise UsageError(f"{paths.root} joined no host; start it with `headway rl --host HOST`")
    setup_logging("trainer", paths, json=settings.log.json_lines, level=settings.log.level)
    from headway.trainer.tenants.remote import train_at_host

    return 0 if train_at_host(settings, paths, tenancy) else STOPPED


def _train_elsewhere(url: str, argv: list[str], *, restart: bool, hosts: str | None) -> int:
    """Train for the run whose control service is at `url`."""
    from headway.config.trainer import TrainSettings
    from headway.launch.joining import join, keep_alive, only_check
    from headway.launch.trainer_hosts import TrainerHosts, parse_hosts
    from headway.monitor.logs import setup_logging
    from headway.trainer.parallel.group import rank_in_group
    from headway.trainer.rl import train
    from headway.transport.control.client import JoinedControl

    if only_check(url, TrainSettings, argv):
        return 0
    joined = join(url, "trainer", TrainSettings, argv, command="train")
    again = ["--run", url, *argv]
    if hosts:
        setup_logging("trainer-host")
        ranks, command = joined.settings.placement.trainer_ranks, ["train", *again, *run_flags(joined.paths)]
        return TrainerHosts(joined.client, parse_hosts(hosts), ranks, command).run()
    if restart:
        return 0 if keep_alive("trainer", ["train", *again, *run_flags(joined.paths)], joined.paths) else STOPPED
    if (code := run_ranks("train", again, joined.settings, joined.paths)) is not None:
        return code
    rank = rank_in_group()
    control = JoinedControl(joined.client, joined.paths, "trainer", f"trainer-{rank}" if rank else "trainer")
    try:
        return 0 if train(joined.settings, joined.paths, control) else STOPPED
    finally:
        control.close()


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


def _layout(settings: "TrainSettings") -> str:
    from headway.models.registry import load_config
    from headway.models.tiny import resolve_model
    from headway.trainer.layout_report import describe_layout

    folder = resolve_model(settings.model.path, settings.model.family)
    return describe_layout(settings, load_config(folder, settings.model.implementation))
