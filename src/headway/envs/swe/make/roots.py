"""Roots: folders with the packages that repositories and their tests need, installed once and then only read."""

import asyncio
import hashlib
import json
import logging
import sys
from collections.abc import Sequence
from pathlib import Path

from headway.base.errors import HeadwayError
from headway.base.files import atomic_directory
from headway.envs.swe.runtime import SITE

logger = logging.getLogger(__name__)

ALWAYS = ("pytest>=8,<10", "coverage>=7,<8")
REQUIREMENTS = "requirements.txt"
SECONDS = 600.0


def root_name(needs: Sequence[str]) -> str:
    """Repositories with equal needs share a root."""
    known = [*sys.version_info[:2], sys.platform, *sorted({*ALWAYS, *needs})]
    return hashlib.sha256(json.dumps(known).encode()).hexdigest()[:16]


async def build_root(folder: Path, needs: Sequence[str]) -> Path:
    """Install what is needed into a root below `folder`, unless it is there. Raises HeadwayError with pip's reason.

    Only wheels are taken, which run nothing when they are installed.
    """
    root = (folder / root_name(needs)).absolute()
    if root.is_dir():
        return root
    logger.info("installing %s", ", ".join([*ALWAYS, *needs]))
    with atomic_directory(root) as aside:
        site = str(aside / SITE)
        pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--quiet"]
        await _pip([*pip, "install", "--only-binary", ":all:", "--target", site, *ALWAYS, *needs])
        frozen = await _pip([*pip, "freeze", "--path", site])
        (aside / REQUIREMENTS).write_text(frozen)
        for path in (aside, *aside.rglob("*")):  # sandboxes run as another user
            path.chmod(0o755 if path.is_dir() or path.stat().st_mode & 0o100 else 0o644)
    return root


async def _pip(command: list[str]) -> str:
    process = await asyncio.create_subprocess_exec(
        *command, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE, stdin=asyncio.subprocess.DEVNULL
    )
    try:
        async with asyncio.timeout(SECONDS):
            out, err = await process.communicate()
    except (TimeoutError, asyncio.CancelledError):
        process.kill()
        raise
    if process.returncode:
        lines = [line for line in err.decode(errors="replace").splitlines() if line.strip()]
        reason = next((line for line in lines if line.startswith("ERROR")), lines[-1] if lines else "no reason")
        raise HeadwayError(f"pip could not install what it needs: {reason}")
    return out.decode(errors="replace")
