"""Settings of a run's control service, by which processes on other hosts join it."""

from pydantic import Field

from headway.config.base import Settings


class ControlSettings(Settings):
    host: str | None = None
    """Address of this host at which processes on other hosts join the run (`--run http://HOST:PORT`); they need its
    token. Default: none, and the run stays on this host or a shared disk."""
    port: int = Field(default=8500, ge=0, le=65535)
    """Port of the control service; 0 picks a free one."""
