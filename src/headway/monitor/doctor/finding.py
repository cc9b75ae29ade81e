"""One thing found out about this machine."""

from dataclasses import dataclass
from typing import Literal

Status = Literal["ok", "note", "warning", "problem"]


@dataclass(frozen=True)
class Finding:
    """`problem`: something will not work. `warning`: something may not, or not well. `note`: an option not taken."""

    subject: str
    status: Status
    text: str
    remedy: str = ""
