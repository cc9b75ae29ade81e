"""`headway rl`: a whole run on this machine."""

import sys
from argparse import Namespace
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from headway.base.errors import STOPPED, UsageError
from headway.cli.options import OptionParser

if TYPE_CHECKING:
    from headway.config.loader import Resolved
    from headway.config.rl import RlSettings
    from headway.transport.tenants.tenancy import Tenancy

HELP = """\
usage: headway rl @ CONFIG.toml [@ MORE.toml ...] [--section.setting VALUE ...]
       headway rl --resume RUN [--section.setting VALUE ...]
       headway rl --from RUN@STEP [@ CONFIG.toml ...] [--section.setting VALUE ...]

Starts inference, orchestrator, trainer and environment workers on this machine and keeps them alive: whatever dies is
started again from what is on disk. Ctrl-C stops the run cleanly, with a checkpoint.

  @ FILE            a layer of settings; later layers and flags win
  --a.b.c VALUE     one setting (`headway config docs` lists all)
  --dry-run         start nothing: check model, environments, devices and parts of your own, write the resolved settings
                    of every process and exit; with --deployment.type slurm, kubernetes or ray, print the job, the
                    manifests or the plan
  --resume RUN      continue a run folder from its last checkpoint; flags change its settings (e.g. --max_steps 400)
  --accept-changed-envs
                    with --resume: continue although the code of an environment is another than the run began with
  --from RUN@STEP   start a new run from a checkpoint of another one
  --only ROLES      start only these here, of inference, orchestrator and trainer, with commas between; the others join
                    from other hosts by `--run URL` (needs --control.host), or strangers sample for the run instead of
                    engines (needs --orchestrator.swarm true)
  --host HOST       be a tenant of a host, at its address or in its folder: it trains the run's adapter and has the
                    engines; environments, metrics and checkpoints are the run's own (docs/tenants.md). The token with
                    which tenants join is read from HEADWAY_TOKEN or the file that HEADWAY_TOKEN_FILE names
  --tenant NAME     name of the run at the host; default: the run's
  --dash            serve the live dashboard of the runs beside this one and print its address: port 8400, or another
                    where that is taken. On a terminal it stays after the last step, until Ctrl-C

Examples:
  headway rl @ examples/reverse_text/rl.toml
  headway rl @ examples/reverse_text/rl.toml --trainer.optim.lr 3e-5 --run.name slower
  headway rl --resume outputs/slower --max_steps 300
  headway rl @ rl.toml --run.name large --deployment.type slurm --deployment.inference.nodes 4
  headway rl @ rl.toml --run.name large --deployment.type kubernetes --dry-run
"""


def run(argv: list[str]) -> int:
    from headway.config.loader import load_settings
    from headway.config.rl import RlSettings
    from headway.launch.checks import check_locks, check_parts, check_start, warnings
    from headway.launch.hosts import with_network_transports
    from headway.launch.tenant import at_host, check_tenant, find_tenancy
    from headway.monitor.dry_run import with_pinned_commits, write_dry_run
    from headway.monitor.runs import open_run
    from headway.orchestrator.environment_record import accept_changed

    options, argv = _parse(argv)
    resolved = load_settings(RlSettings, argv)
    tenancy = None
    if not resolved.dry_run:
        tenancy = find_tenancy(options.host, options.tenant, options.resume, resolved.settings.run)
    if tenancy is not None:
        resolved = replace(resolved, settings=at_host(resolved.settings, tenancy))
    elif options.host:
        check_tenant(resolved.settings)
    settings = resolved.settings
    # In a swarm, strangers do the work of engines.
    if options.only and settings.control.host is None and not settings.orchestrator.swarm:
        raise UsageError("--only leaves the others to other hosts: give the address they join at, --control.host")
    if options.only and settings.orchestrator.swarm and settings.orchestrator.eval.envs and not settings.control.host:
        raise UsageError("strangers evaluate nothing: start engines, too, or set orchestrator.eval.envs to []")
    if options.accept_changed_envs and not resolved.dry_run:
        accept_changed(open_run(options.resume))
    elsewhere = resolved.settings.deployment.type != "local"
    # A node that runs the orchestrator has its own address then.
    host = "127.0.0.1" if elsewhere else resolved.settings.control.host
    resolved = replace(resolved, settings=with_network_transports(resolved.settings, resolved.origins, host))
    if elsewhere:
        return _deploy(resolved, options.resume)
    if resolved.dry_run:
        print(*(f"checked: {line}" for line in check_parts(resolved.settings)), sep="\n", file=sys.stderr)
        _report_machine(resolved.settings)
    else:
        check_start(resolved.settings)  # before there is a folder, so that the run's name stays free
    check_locks(resolved.settings, resolved.files)
    if not options.resume and not options.parent:
        for line in warnings(resolved.settings):
            print(f"warning: {line}", file=sys.stderr)
    if resolved.dry_run and not options.resume:
        print(*write_dry_run(resolved.settings, "rl"), sep="\n")
        return 0
    if not resolved.dry_run:  # before the run's folder is made: a model that is not there leaves nothing behind
        resolved = replace(resolved, settings=with_pinned_commits(resolved.settings))
    return _start(resolved, options, tenancy)


def _report_machine(settings: "RlSettings") -> None:
    """Say how a dry run's processes would share this machine; a warning, since they may be meant for others."""
    from headway.launch.checks import check_machine

    try:
        print(f"checked: {check_machine(settings)}", file=sys.stderr)
    except UsageError as error:
        print(f"warning: it cannot start on this machine: {error}", file=sys.stderr)


def _parse(argv: list[str]) -> tuple[Namespace, list[str]]:
    """Return the command's own options, and the layers and settings that a resumed or forked run begins from."""
    from headway.launch.fork import parse_checkpoint
    from headway.launch.hosts import parse_roles
    from headway.monitor.runs import open_run

    parser = OptionParser("rl", dash=False, resume=Path, only=str, accept_changed_envs=False, host=str, tenant=str)
    parser.add_argument("--from", dest="parent")
    options, argv = parser.parse_known_args(argv)
    if options.resume and options.parent:
        raise UsageError("--resume continues a run and --from starts a new one; give one of them")
    if options.accept_changed_envs and not options.resume:
        raise UsageError("--accept-changed-envs goes with --resume RUN: a new run takes environments as they are")
    if options.resume:
        argv = ["@", str(open_run(options.resume).config / "rl.toml"), *argv]
    if options.parent:
        options.parent = parse_checkpoint(options.parent)
        origin, _ = options.parent
        argv = ["@", str(origin.config / "rl.toml"), "--run.name", "none", *argv]
    options.roles = parse_roles(options.only)
    return options, argv


def _start(resolved: "Resolved[RlSettings]", options: Namespace, tenancy: "Tenancy | None") -> int:
    """Run in a folder of its own or the resumed one; with --dry-run, write there what the processes would get."""
    from headway.cli.dash import start_beside, stay
    from headway.config.commands import write_process_settings
    from headway.launch.fork import check_fork, fork_run
    from headway.launch.rl import run_rl
    from headway.launch.tenant import join_from, leave_host
    from headway.monitor.dry_run import with_absolute_paths
    from headway.monitor.runs import create_run, discard_run, open_run

    if options.parent:
        origin, step = options.parent
        check_fork(origin, step, resolved.settings.max_steps)
    paths = open_run(options.resume) if options.resume else create_run(resolved.settings.run, "rl")
    settings = with_absolute_paths(resolved.settings, paths, pin=False)
    if resolved.dry_run:
        print(*write_process_settings(settings, paths.config), sep="\n")
        return 0
    if options.parent:
        origin, step = options.parent
        fork_run(origin, step, paths)
    dashboard = start_beside(paths.root.parent) if options.dash else None
    if dashboard:
        print(f"live dashboard: {dashboard}", flush=True)
    try:
        if tenancy is not None:
            join_from(settings, paths, tenancy)
        finished = run_rl(settings, paths, roles=options.roles, tenancy=tenancy)
        if tenancy is not None:
            leave_host(paths, tenancy)
        if dashboard and finished:
            stay(dashboard)
        return 0 if finished else STOPPED
    except UsageError:
        if not options.resume:
            discard_run(paths)
        raise


def _chosen_port(resolved: "Resolved[RlSettings]") -> int | None:
    """Return the control service's port where the user chose one. A run's own settings name the default as well."""
    port = resolved.settings.control.port
    chosen = resolved.origins.get("control.port", "").startswith("--") or port != type(resolved.settings.control)().port
    return port if chosen else None


def _deploy(resolved: "Resolved[RlSettings]", resume: Path | None) -> int:
    """Give the run to a scheduler; with --dry-run, print what it would get instead."""
    from headway.config.loader import write_settings
    from headway.launch.deployments.launcher import find_launcher
    from headway.monitor.dry_run import with_absolute_paths
    from headway.monitor.runs import create_run, open_run

    launcher = find_launcher(resolved.settings.deployment.type)
    port = _chosen_port(resolved)
    if resolved.dry_run:
        print(launcher.preview(resolved.settings, port), end="")
        return 0
    launcher.preview(resolved.settings, port)  # what it refuses should leave no folder
    paths = open_run(resume) if resume else create_run(resolved.settings.run, "rl")
    settings = with_absolute_paths(resolved.settings, paths)
    write_settings(settings, paths.config / "rl.toml")
    return 0 if launcher.launch(settings, paths, port) else STOPPED
