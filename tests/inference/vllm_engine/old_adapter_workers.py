"""Workers whose layers for adapters are those of vLLM 0.26: weights cannot be loaded through them."""

from typing import Any

from headway.inference.vllm.worker import HeadwayWorker


class OldAdapterWorker(HeadwayWorker):
    def headway_load(self, path: str, spans: list[list[Any]]) -> None:
        from vllm.lora.layers import BaseLayerWithLoRA

        for newer in ("load_weights", "__getattr__"):
            if newer in vars(BaseLayerWithLoRA):
                delattr(BaseLayerWithLoRA, newer)
        super().headway_load(path, spans)
