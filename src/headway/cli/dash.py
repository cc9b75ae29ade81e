"""`headway dash`: the live dashboard of runs."""

import sys
import threading
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

from headway.base.errors import HeadwayError, UsageError
from headway.cli.options import OptionParser, port_number

if TYPE_CHECKING:
    from headway.monitor.dashboard.server import Routes

PORT = 8400

HELP = """\
usage: headway dash [FOLDER] [--port 8400] [--host 127.0.0.1]

Serves a dashboard of the runs in FOLDER (outputs/), or of the one run that FOLDER is: live charts, a timeline,
rollouts, steps, plan, settings and logs. It only reads, so it works on finished and on copied runs.

  --port N      the port to listen on (8400; 0 takes any free one)
  --host NAME   the address to listen on. The dashboard has no password: leave it on loopback, and reach the one
                of another machine through a tunnel: ssh -L 8400:localhost:8400 HOST

Examples:
  headway dash
  headway dash outputs/my-run --port 0
"""


def run(argv: list[str]) -> int:
    folder, host, port = parse(argv)
    from headway.monitor.dashboard import serve

    def ready(url: str) -> None:
        print(f"the runs in {folder} are at {url}  (Ctrl-C ends it)", flush=True)
        if host not in ("127.0.0.1", "localhost", "::1"):
            print(f"headway: everyone who can reach {host} can read these runs", file=sys.stderr)

    try:
        serve(folder, host, port, ready, page_routes())
    except KeyboardInterrupt:
        print()
    return 0


def start_beside(folder: Path) -> str:
    """Serve the runs of `folder` while this process lives, at the usual port or, where it is taken, at any free one.

    Returns the address.
    """
    from headway.monitor.dashboard import start_in_thread

    try:
        return start_in_thread(folder, PORT, page_routes())
    except HeadwayError:
        return start_in_thread(folder, routes=page_routes())


def stay(url: str) -> None:
    """Keep the dashboard of a run that has ended until Ctrl-C, where somebody sits at a terminal to press it."""
    if not sys.stdout.isatty():
        return
    print(f"the dashboard stays at {url}  (Ctrl-C ends it)", flush=True)
    with suppress(KeyboardInterrupt):
        _wait()
    print()


def _wait() -> None:
    threading.Event().wait()


def page_routes() -> "Routes":
    """Return the routes of pages whose data come from replay, plan and swarm."""
    from headway.plan.page import plan_routes
    from headway.replay.page import ROUTES
    from headway.swarm.work.page import swarm_routes

    return {**ROUTES, **plan_routes(), **swarm_routes()}


def parse(argv: list[str]) -> tuple[Path, str, int]:
    """Read folder, host and port. Raises UsageError."""
    parser = OptionParser("dash", host="127.0.0.1")
    parser.add_argument("folder", type=Path, nargs="?", default=Path("outputs"))
    parser.add_argument("--port", type=port_number, default=PORT)
    options = parser.parse_args(argv)
    if not options.folder.is_dir():
        raise UsageError(f"{options.folder} is not a folder; name the folder that holds runs, or a run")
    return options.folder, options.host, options.port
