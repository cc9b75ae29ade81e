"""The LoRA adapters an engine serves: names, versions, and their slots in the model's bank."""

from dataclasses import dataclass

from headway.models.decoder import DecoderLM


@dataclass(slots=True)
class _Loaded:
    slot: int
    version: int
    epoch: int


class Adapters:
    """`epoch` counts what was loaded, so that KV of one version is never taken for another's."""

    def __init__(self, model: DecoderLM) -> None:
        self._model = model
        self._loaded: dict[str, _Loaded] = {}

    def __contains__(self, name: str) -> bool:
        return name in self._loaded

    def versions(self) -> dict[str, int]:
        return {name: loaded.version for name, loaded in self._loaded.items()}

    def version(self, name: str) -> int:
        return self._loaded[name].version

    def slot(self, name: str | None) -> int:
        return -1 if name is None else self._loaded[name].slot

    def epoch(self, name: str | None) -> int:
        return 0 if name is None else self._loaded[name].epoch
