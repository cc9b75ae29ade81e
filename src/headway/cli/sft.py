"""`headway sft`: supervised fine-tuning on conversations."""

from pathlib import Path
from typing import TYPE_CHECKING

from headway.base.errors import STOPPED, UsageError
from headway.cli.options import OptionParser
from headway.cli.train import run_ranks
from headway.launch.joining import run_flags

if TYPE_CHECKING:
    from headway.config.sft import SftSettings
    from headway.core.runs import RunPaths
    from headway.transport.tenants.tenancy import Tenancy

HELP = """\
usage: headway sft @ SFT.toml [@ MORE.toml ...] [--section.setting VALUE ...]
       headway sft --resume RUN [--section.setting VALUE ...]

Fine-tunes a model on rows with `messages` (and `tools`), or `prompt` and `completion`: JSONL or Parquet files, folders
of them, or a Hugging Face dataset. Leaves checkpoints and a Hugging Face model in the run's folder. Ctrl-C finishes the
step, writes a checkpoint, says how to continue and exits with 130. With placement.trainer_ranks above 1 it starts that
many ranks on this machine.

  @ FILE            a layer of settings; later layers and flags win
  --a.b.c VALUE     one setting (`headway config docs` lists all)
  --dry-run         write the resolved settings and exit
  --resume RUN      continue a run from its newest complete checkpoint
  --host HOST       be a tenant of a host, at its address or in its folder, which trains the run's adapter; rows,
                    metrics and checkpoints are the run's own (docs/tenants.md). The token with which tenants join is
                    read from HEADWAY_TOKEN or the file that HEADWAY_TOKEN_FILE names
  --tenant NAME     name of the run at the host; default: the run's

Examples:
  headway sft --data.path chats.jsonl --model.path tiny --trainer.optim.lr 1e-3 --max_steps 100
  headway sft @ examples/warm_up.toml --data.path chats/ --data.validation_path held_out.jsonl
  headway sft @ sft.toml --model.lora.rank 16 --placement.trainer_ranks 2
  headway sft @ sft.toml --model.lora.rank 16 --run.name dora --host outputs/host
"""


def run(argv: list[str]) -> int:
    from headway.config.loader import load_settings, write_settings
    from headway.config.sft import SftSettings
    from headway.launch.tenant import check_tenant, find_tenancy, reach_host
    from headway.monitor.dry_run import with_absolute_paths, with_pinned_commits, write_dry_run
    from headway.monitor.runs import create_run, join_run, open_run
    from headway.trainer.parallel.group import in_group, rank_in_group

    options, argv = OptionParser("sft", resume=Path, host=str, tenant=str).parse_known_args(argv)
    if options.resume:
        paths = open_run(options.resume)
        argv = ["@", str(paths.config / "sft.toml"), *run_flags(paths), *argv]
    resolved = load_settings(SftSettings, argv)
    settings = resolved.settings
    if not settings.data.path:
        raise UsageError("data.path is not set; give a JSONL or Parquet file, a folder of them, or a dataset's name")
    if options.host:
        check_tenant(settings)
    if resolved.dry_run:
        print(*write_dry_run(settings, "sft"), sep="\n")
        return 0
    tenancy = None if in_group() else find_tenancy(options.host, options.tenant, options.resume, settings.run)
    if tenancy is not None:
        reach_host(tenancy)
    settings = with_pinned_commits(settings)
    paths = join_run(settings.run, "sft") if options.resume or in_group() else create_run(settings.run, "sft")
    if rank_in_group() == 0:
        write_settings(with_absolute_paths(settings, paths), paths.config / "sft.toml")
    if tenancy is not None:
        settings = with_absolute_paths(settings, paths, pin=False)
        return _run_at_host(settings, paths, tenancy, new=options.resume is None)
    if (code := run_ranks("sft", argv, settings, paths)) is not None:
        return code
    from headway.monitor.attempts import recorded_attempt
    from headway.trainer.sft import sft

    if rank_in_group() > 0:
        return 0 if _is_last(sft(settings, paths), settings) else STOPPED
    with recorded_attempt(paths) as attempt:
        finished = _is_last(sft(settings, paths), settings)
        if not finished:
            attempt.end("stopped", "asked to stop")
    return _end(paths, finished)


def _is_last(export: Path, settings: "SftSettings") -> bool:
    return int(export.name.rpartition("_")[2]) >= settings.max_steps


def _run_at_host(settings: "SftSettings", paths: "RunPaths", tenancy: "Tenancy", *, new: bool) -> int:
    """Be a tenant until the last step, or until asked to stop."""
    from headway.launch.tenant import join_from, leave_host
    from headway.monitor.attempts import recorded_attempt
    from headway.monitor.logs import setup_logging
    from headway.monitor.runs import discard_run
    from headway.trainer.tenants.sft import sft_at_host

    setup_logging("trainer", paths, json=settings.log.json_lines, level=settings.log.level)
    try:
        join_from(settings, paths, tenancy)
    except UsageError:
        if new:
            discard_run(paths)
        raise
    with recorded_attempt(paths) as attempt:
        finished = sft_at_host(settings, paths, tenancy)
        if not finished:
            attempt.end("stopped", "asked to stop")
    leave_host(paths, tenancy)
    return _end(paths, finished)


def _end(paths: "RunPaths", finished: bool) -> int:
    """Say what came of the run and what to do next. Returns the exit code."""
    from headway.launch.summary import summary_lines

    print(*summary_lines(paths, finished=finished, command="sft"), sep="\n", flush=True)
    return 0 if finished else STOPPED
