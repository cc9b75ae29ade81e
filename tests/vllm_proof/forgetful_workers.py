"""Workers that forget what they are told to: each way is a way in which a reload goes wrong without an error."""

import os
from pathlib import Path
from typing import Any

from torch import nn

from headway.inference.vllm.worker import HeadwayWorker, pack_experts, pack_heads

FORGET = "HEADWAY_TEST_FORGET"
"""Names the file whose content is what a load forgets: "heads", "experts", or the name of a tensor.

One load alone, unless it says " always".
"""


class ForgetfulWorker(HeadwayWorker):
    _forgotten = ""

    def headway_load(self, path: str, places: list[list[Any]]) -> None:
        file = Path(os.environ[FORGET])
        self._forgotten, _, always = file.read_text().partition(" ")
        if not always:
            file.write_text("")
        super().headway_load(path, [place for place in places if place[0] != self._forgotten])

    def headway_pack(self, model: nn.Module) -> None:
        if self._forgotten != "heads":
            pack_heads(model)
        if self._forgotten != "experts":
            pack_experts(model)
