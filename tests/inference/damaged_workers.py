"""Workers of which one damages what it has loaded: one number of an embedding row that no probe reads."""

import os
from pathlib import Path

import torch
from torch import nn

from headway.inference.vllm.worker import HeadwayWorker

DAMAGE = "HEADWAY_TEST_DAMAGE"
"""Names the file whose content is the kind of rank whose second one damages its next load: "tensor" or "data"."""


class DamagedWorker(HeadwayWorker):
    def headway_pack(self, model: nn.Module) -> None:
        super().headway_pack(model)
        file, parallel = Path(os.environ[DAMAGE]), self.vllm_config.parallel_config
        if file.exists() and {"tensor": self.rank, "data": parallel.data_parallel_index}[file.read_text()] == 1:
            file.unlink()
            row = next(p for name, p in model.named_parameters() if name.endswith("embed_tokens.weight"))[5]
            with torch.no_grad():
                row[0] += 1e-3
