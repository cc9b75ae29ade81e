"""The run's token: the secret of its admin routes, its control service and its rollouts. It never is an argument."""

import hmac
import os
import secrets
from pathlib import Path

from headway.base.errors import UsageError
from headway.base.files import write_atomic
from headway.core.runs import RunPaths

TOKEN = "HEADWAY_TOKEN"
TOKEN_FILE = "HEADWAY_TOKEN_FILE"


def find_token(run: RunPaths | None = None) -> str | None:
    """Return HEADWAY_TOKEN, the content of HEADWAY_TOKEN_FILE, or the run's own token; None where there is none.

    Raises UsageError when HEADWAY_TOKEN_FILE cannot be read.
    """
    if token := os.environ.get(TOKEN, "").strip():
        return token
    if file := os.environ.get(TOKEN_FILE):
        return read_token(Path(file))
    if run is not None and (run.control / "token").is_file():
        return (run.control / "token").read_text().strip() or None
    return None


def read_token(file: Path) -> str:
    """Read a token. Raises UsageError where there is none, or where others on this machine may read it."""
    try:
        token, mode = file.read_text().strip(), file.stat().st_mode
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"{file}: cannot read the run's token: {getattr(error, 'strerror', error)}") from None
    if not token:
        raise UsageError(f"{file} is empty; it should hold the run's token, as RUN/control/token does")
    if mode & 0o077:
        raise UsageError(f"{file} can be read by others; it holds the run's token: chmod 600 {file}")
    return token


def write_token(paths: RunPaths) -> None:
    """Keep the run's secret, readable by its owner only: the one of the environment, or a new one, made once."""
    paths.control.mkdir(mode=0o700, parents=True, exist_ok=True)
    token = find_token(paths) or secrets.token_urlsafe(32)
    file = paths.control / "token"
    write_atomic(file, token)
    file.chmod(0o600)


def is_bearer(header: str | None, token: str) -> bool:
    """Tell if an Authorization header holds the token, in time that does not depend on where they differ."""
    given = (header or "").removeprefix("Bearer ")
    return hmac.compare_digest(given.encode(errors="surrogateescape"), token.encode())
