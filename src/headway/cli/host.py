"""`headway host`: one frozen model for many LoRA runs."""

import sys
from pathlib import Path
from typing import TYPE_CHECKING

from headway.base.errors import STOPPED, UsageError
from headway.cli.options import OptionParser

if TYPE_CHECKING:
    from headway.core.tenants import HostStatus

HELP = """\
usage: headway host @ HOST.toml [@ MORE.toml ...] [--section.setting VALUE ...]
       headway host --resume FOLDER [--section.setting VALUE ...]
       headway host status FOLDER|URL [--json]

Serves one frozen model to many LoRA runs, its tenants: one trainer and one set of engines, kept alive. Each tenant is
an ordinary run with its own environments, algorithm, metrics and checkpoints, started with `headway rl --host`. Tenants
come and go while the others train; each gets its share of the trainer (docs/tenants.md).

  @ FILE            a layer of settings; later layers and flags win
  --a.b.c VALUE     one setting (`headway config docs` lists all); those of [host] are the service, bounds and shares
  --resume FOLDER   start a host again, with its tenants, at its old addresses
  --dry-run         write the resolved settings and exit
  status            show tenants, shares, steps, queue times and costs. At a URL it needs the host's own token, from
                    HEADWAY_TOKEN or the file that HEADWAY_TOKEN_FILE names
  --json            with status: one JSON object

Tenants need the token in FOLDER/control/join_token, never the host's own.

Examples:
  headway host --model.path tiny --run.name my-host
  headway rl @ anna.toml --host outputs/my-host
  HEADWAY_TOKEN_FILE=join_token headway rl @ ben.toml --host http://10.0.0.1:8600
  headway host status outputs/my-host
"""


def run(argv: list[str]) -> int:
    if argv[0] == "status":
        return _status(argv[1:])
    from headway.config.host import HostSettings
    from headway.config.loader import load_settings
    from headway.launch.host import run_host
    from headway.monitor.dry_run import with_absolute_paths, with_pinned_commits, write_dry_run
    from headway.monitor.runs import create_run, discard_run, open_run

    options, argv = OptionParser("host", resume=Path, trainer=Path).parse_known_args(argv)
    if options.trainer:
        return _train(options.trainer)
    if options.resume:
        argv = ["@", str(open_run(options.resume).config / "host.toml"), *argv]
    resolved = load_settings(HostSettings, argv)
    if resolved.dry_run:
        print(*write_dry_run(resolved.settings, "host"), sep="\n")
        return 0
    settings = with_pinned_commits(resolved.settings)
    paths = open_run(options.resume) if options.resume else create_run(settings.run, "host")
    try:
        run_host(with_absolute_paths(settings, paths, pin=False), paths)
    except UsageError:
        if not options.resume:
            discard_run(paths)
        raise
    print(f"start it again with: headway host --resume {paths.root}", file=sys.stderr)
    return STOPPED


def _train(folder: Path) -> int:
    """Be the trainer process of a host, which `headway host` starts."""
    from headway.config.host import HostSettings
    from headway.config.loader import load_settings
    from headway.monitor.logs import setup_logging
    from headway.monitor.runs import open_run

    paths = open_run(folder)
    settings = load_settings(HostSettings, ["@", str(paths.config / "host.toml")]).settings
    setup_logging("trainer", paths, json=settings.log.json_lines, level=settings.log.level)
    from headway.trainer.tenants.serve import serve_tenants

    serve_tenants(settings, paths)
    return STOPPED


def _status(argv: list[str]) -> int:
    import msgspec

    from headway.core.runs import RunPaths
    from headway.transport.control.tokens import find_token, read_token
    from headway.transport.tenants.client import HostClient
    from headway.transport.tenants.tenancy import ADDRESS_FILE

    parser = OptionParser("host", json=False)
    parser.add_argument("host")
    options = parser.parse_args(argv)
    if options.host.startswith(("http://", "https://")):
        url, token = options.host, find_token()
    else:
        control = RunPaths(Path(options.host)).control
        try:
            url = (control / ADDRESS_FILE).read_text().strip()
        except FileNotFoundError:
            raise UsageError(f"{options.host} is neither a host's address, http://HOST:PORT, nor its folder") from None
        token = read_token(control / "token")
    status = HostClient(url, token).status()
    print(msgspec.json.encode(status).decode() if options.json else "\n".join(_lines(status)))
    return 0


def _lines(status: "HostStatus") -> list[str]:
    lines = [f"{status.model}: {len(status.tenants)} tenants, {status.passes} passes in {status.busy_seconds:.0f} s"]
    lines += [f"engine {name}: {url}" for name, url in status.engines.items()]
    if status.tenants:
        lines.append(
            f"{'tenant':<20} {'state':<9} {'step':>6} {'weight':>6} {'share':>6} {'tokens':>10} "
            f"{'sampled':>10} {'seconds':>8} {'queued':>7} {status.currency and 'cost':>8} refused"
        )
    for t in status.tenants:
        lines.append(
            f"{t.name:<20} {t.state:<9} {t.step:>6} {t.weight:>6.3g} {t.share:>6.0%} {t.tokens:>10} "
            f"{t.sampled_tokens:>10} {t.seconds:>8.1f} {t.queue_seconds:>7.1f} "
            f"{f'{t.cost:.4f}' if status.currency else '':>8} {t.refused}"
            f"{f' ({t.last_refusal})' if t.last_refusal else ''}"
        )
    if status.currency:
        lines.append(f"cost is that of the trainer's seconds, in {status.currency}")
    if status.refused:
        lines.append(f"{status.refused} requests of nobody known were refused")
    return lines
