"""`headway dash`: the live page of runs."""

import sys
from pathlib import Path

from headway.core.errors import UsageError

HELP = """\
usage: headway dash [FOLDER] [--port 8400] [--host 127.0.0.1]

Serves one page over the runs in FOLDER (outputs/), or over the one run that FOLDER is: charts that grow with the
run, lanes, rollouts, settings and logs. It only reads, so it works on finished and on copied runs.

  --port N      the port to listen on (8400; 0 takes any free one)
  --host NAME   the address to listen on. The page has no password: leave it on loopback, and reach another
                machine's page through a tunnel: ssh -L 8400:localhost:8400 HOST

Examples:
  headway dash
  headway dash outputs/my-run --port 0
"""


def run(argv: list[str]) -> int:
    if any(word in ("-h", "--help") for word in argv):
        print(HELP, end="")
        return 0
    folder, host, port = parse(argv)
    from headway.monitor.dashboard import serve

    def ready(url: str) -> None:
        print(f"the runs in {folder} are at {url}  (Ctrl-C ends it)", flush=True)
        if host not in ("127.0.0.1", "localhost", "::1"):
            print(f"headway: everyone who can reach {host} can read these runs", file=sys.stderr)

    try:
        serve(folder, host, port, ready)
    except KeyboardInterrupt:
        print()
    return 0


def parse(argv: list[str]) -> tuple[Path, str, int]:
    """Folder, host and port. Raises UsageError."""
    folder, host, port = Path("outputs"), "127.0.0.1", "8400"
    words, given = list(argv), False
    while words:
        word, equals, value = words.pop(0).partition("=")
        if word in ("--port", "--host"):
            if not equals and not words:
                raise UsageError(f"{word} needs a value")
            value = value if equals else words.pop(0)
            host, port = (value, port) if word == "--host" else (host, value)
        elif word.startswith("-") or given:
            raise UsageError(f"unexpected {word}; see `headway dash --help`")
        else:
            folder, given = Path(word), True
    if not port.isdigit() or int(port) > 65535:
        raise UsageError(f"--port must be a number from 0 to 65535, got {port!r}")
    if not folder.is_dir():
        raise UsageError(f"{folder} is not a folder; name the folder that holds runs, or a run")
    return folder, host, int(port)
