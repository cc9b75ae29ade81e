"""`headway sandboxes`: sandboxes of this machine for others."""

import asyncio
import signal
import sys
from argparse import Namespace
from pathlib import Path

from headway.base.addresses import cannot_listen
from headway.base.errors import UsageError
from headway.cli.options import OptionParser, port_number

HELP = """\
usage: headway sandboxes [--access FILE] [--host 127.0.0.1] [--port 8400] [--url URL] [options]

Runs sandboxes on this machine for environments on others. It writes an access file with its address and a token;
copy that to the other machine (it is a secret) and name it there: sandbox = "host:/path/to/access.json"

  --access FILE    where the access file goes (access.json); the token of one that is there is kept
  --host ADDRESS   the address to listen at (127.0.0.1); nothing is encrypted, so use a network you trust, or a tunnel
  --port PORT      the port (8400); 0 takes a free one
  --url URL        the address that clients use, where it is not http://HOST:PORT, for example behind a tunnel
  --sandbox KIND   the kind of sandbox (auto)
  --most N         sandboxes at once (32); clients that hold few come first
  --warm N         sandboxes started ahead of their use (0)
  --show FOLDER    a folder that clients may have in their sandboxes, read-only; may be given several times

A client's sandboxes end when it does, however it is killed; what a killed host leaves is removed when the next starts.

Examples:
  headway sandboxes --access ~/access.json
  headway sandboxes --host 10.0.0.2 --most 64 --show /data/tasks/roots
  ssh -N -L 8400:127.0.0.1:8400 big-machine     # on the client: the host stays on its loopback address
"""


def run(argv: list[str]) -> int:
    parser = OptionParser("sandboxes", host="127.0.0.1", url="", sandbox="auto", most=32, warm=0)
    parser.add_argument("--access", type=Path, default=Path("access.json"))
    parser.add_argument("--port", type=port_number, default=8400)
    parser.add_argument("--show", type=Path, action="append", default=[])
    options = parser.parse_args(argv)
    if options.most < 1 or options.warm < 0:
        raise UsageError(f"--most must be at least 1 and --warm at least 0 (got {options.most} and {options.warm})")
    for folder in options.show:
        if not folder.is_dir():
            raise UsageError(f"--show {folder}: no such folder")
    if options.sandbox.partition(":")[0] == "host":
        raise UsageError("--sandbox host: a host can't ask another host for its sandboxes")
    return asyncio.run(_serve(options))


async def _serve(options: Namespace) -> int:
    from headway.sandboxes.pool import SandboxPool
    from headway.sandboxes.remote.host import SandboxHost, serving
    from headway.sandboxes.remote.wire import write_access

    stop = asyncio.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    pool = SandboxPool(options.sandbox, most=options.most, warm=options.warm)
    # The token is there before the port: who connects first must not find a host without one.
    access = write_access(options.access, options.url)
    host = SandboxHost(pool, access.token, options.show)
    try:
        async with serving(host, options.host, options.port) as port:
            address = f"[{options.host}]" if ":" in options.host else options.host
            access = write_access(options.access, options.url or f"http://{address}:{port}")
            print(f"sandboxes at http://{address}:{port}, access file {options.access}", file=sys.stderr, flush=True)
            await stop.wait()
    except OSError as error:
        raise cannot_listen(options.host, options.port, error) from None
    return 0
