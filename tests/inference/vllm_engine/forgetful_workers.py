"""Workers that forget what they are told to: each way is a way in which a reload goes wrong without an error."""

import os
from pathlib import Path
from typing import Any

from torch import nn

from headway.inference.vllm.internals import pack_experts, pack_heads
from headway.inference.vllm.worker import HeadwayWorker

FORGET = "HEADWAY_TEST_FORGET"
"""Names the file whose lines are what one load after another forgets: "heads", "experts", or the name of a tensor."""


class ForgetfulWorker(HeadwayWorker):
    _forgotten = ""

    def headway_load(self, path: str, spans: list[list[Any]]) -> None:
        file = Path(os.environ[FORGET])
        self._forgotten, _, later = file.read_text().partition("\n")
        file.write_text(later)
        super().headway_load(path, [span for span in spans if span[0] != self._forgotten])

    def headway_pack(self, model: nn.Module) -> None:
        if self._forgotten not in ("heads", "experts"):
            super().headway_pack(model)
        elif self._forgotten == "experts":
            pack_heads(model)
        else:
            pack_experts(model)
