"""The place where a task is worked on and judged."""

from dataclasses import dataclass

from headway.envs.swe.archives import Files
from headway.envs.swe.runtime import Runtime
from headway.envs.swe.tasks import Repository
from headway.sandboxes.pool import SandboxPool


@dataclass(frozen=True)
class Workplace:
    """Sandboxes, the repository with its files before anything is broken or planted, and the interpreter for it."""

    pool: SandboxPool
    repository: Repository
    files: Files
    runtime: Runtime
