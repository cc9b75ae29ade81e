"""`headway swarm`: the service of a run for strangers, keys, and the audit of a ledger."""

import asyncio
import os
from pathlib import Path

from headway.base.errors import UsageError
from headway.cli.options import OptionParser, port_number, public_key, server_url

HELP = """\
usage: headway swarm serve RUN [--host ADDRESS] [--port N] [--relay URL ...] [--megabytes N]
       headway swarm audit LEDGER [--key KEY]
       headway swarm key FILE

serve: lets strangers work for a run that was started with --orchestrator.swarm true: gives orders, verifies what comes
back, and hands verified groups to the run's orchestrator (docs/swarm.md). Ends with the run. It can be stopped and
started at any time.

  --host ADDRESS  address to listen at; any other than loopback needs the run's tls.certificate (127.0.0.1)
  --port N        port; 0 picks a free one (8500)
  --relay URL     tell workers to fetch weights there first; may be given several times
  --megabytes N   send at most this many megabytes of weights a second

audit: checks a swarm's ledger, which anyone can do who has the file: that no line was changed, left out or moved,
that the run's key signed them all, and that the run kept its own rules. Shows every worker's record. Exits with 4
where the ledger was tampered with, and with 1 where a rule was broken.
key: shows the public key of the private key in FILE; makes one where there is none.

  --key KEY   the run's public key, 64 hexadecimal digits (the one that the ledger itself names)

Examples:
  headway swarm serve outputs/my-run
  headway swarm audit ledger.jsonl
  headway swarm key ~/.config/headway/swarm.key
"""


def run(argv: list[str]) -> int:
    match argv:
        case ["serve", *rest]:
            return serve(rest)
        case ["audit", *rest]:
            return audit(rest)
        case ["key", *rest]:
            return key(rest)
    raise UsageError("say `headway swarm serve RUN`, `audit LEDGER` or `key FILE`; see `headway swarm --help`")


def serve(argv: list[str]) -> int:
    from headway.config.loader import load_settings
    from headway.config.orchestrator import OrchestrateSettings
    from headway.monitor.logs import setup_logging
    from headway.monitor.runs import open_run
    from headway.swarm.work.host import SwarmHost
    from headway.swarm.work.site import serve_while, swarm_tls, until_stopped
    from headway.transport.control.tokens import TOKEN, find_token

    parser = OptionParser("swarm serve", host="127.0.0.1", megabytes=float)
    parser.add_argument("run", type=Path)
    parser.add_argument("--port", type=port_number, default=8500)
    parser.add_argument("--relay", type=server_url, action="append", default=[])
    options = parser.parse_args(argv)
    paths = open_run(options.run)
    settings = load_settings(OrchestrateSettings, ["@", str(paths.config / "orchestrator.toml")]).settings
    setup_logging("swarm", paths, json=settings.log.json_lines, level=settings.log.level)
    tls = swarm_tls(settings.tls, options.host)
    if token := find_token(paths):
        os.environ[TOKEN] = token  # by which this process fetches the trainer's weights; strangers never see it
    limit = None if options.megabytes is None else options.megabytes * 1e6
    host = SwarmHost(settings, paths, options.relay, limit)
    print(f"run key: {host.key.public.hex()}", flush=True)
    return asyncio.run(
        until_stopped(serve_while(host.service.app, options.host, options.port, tls, host.watch(), "swarm service"))
    )


def audit(argv: list[str]) -> int:
    from headway.swarm.trust.audit import audit_ledger, report_lines

    parser = OptionParser("swarm audit")
    parser.add_argument("ledger", type=Path)
    parser.add_argument("--key", type=public_key)
    options = parser.parse_args(argv)
    report = audit_ledger(options.ledger, options.key)
    print("\n".join(report_lines(report)))
    return int(bool(report.problems))


def key(argv: list[str]) -> int:
    from headway.swarm.messages.keys import SigningKey

    parser = OptionParser("swarm key")
    parser.add_argument("file", type=Path)
    options = parser.parse_args(argv)
    print(SigningKey.open(options.file).public.hex())
    return 0
