"""The LoRA adapters that vLLM serves: names, versions, and the folders it reads them from."""

import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
from safetensors.torch import save_file
from torch import Tensor

from headway.config.shared import LoraSettings
from headway.core.protocol import WeightUpdate
from headway.inference.engine import UpdateError
from headway.inference.vllm.weights import last_line
from headway.models.adapters.lora import CONFIG, WEIGHTS


@dataclass(slots=True)
class _Loaded:
    number: int
    version: int
    fingerprint: str
    folder: tempfile.TemporaryDirectory[str]
    epoch: int


class LoadedAdapters:
    """Adapters by name. `enabled`: vLLM has room for them. `lora` says how they are scaled where an update does not.

    `epoch` counts what was loaded under a name, so that KV of one version is never taken for another's.
    """

    def __init__(self, *, enabled: bool, lora: LoraSettings | None) -> None:
        self._enabled = enabled
        self._lora = lora
        self._loaded: dict[str, _Loaded] = {}
        self._numbers = 0
        self._epochs = 0

    def __contains__(self, name: str) -> bool:
        return name in self._loaded

    def versions(self) -> dict[str, int]:
        return {name: loaded.version for name, loaded in self._loaded.items()}

    def serves(self, update: WeightUpdate) -> bool:
        loaded = self._loaded.get(update.adapter or "")
        return loaded is not None and (loaded.version, loaded.fingerprint) == (update.version, update.fingerprint)

    def epoch(self, name: str) -> int:
        return self._loaded[name].epoch if name in self._loaded else 0

    def request(self, name: str) -> Any:
        """The LoRARequest that goes with requests for `name`; None where that is no adapter."""
        loaded = self._loaded.get(name)
        return None if loaded is None else _lora_request(name, loaded.number, loaded.folder.name)

    def check_enabled(self) -> None:
        """Raises UpdateError."""
        if not self._enabled:
            raise UpdateError(
                "vLLM was started without room for adapters; start the server with --model.lora.rank, or with "
                "--inference.vllm.enable_lora true"
            )

    async def load(self, llm: Any, update: WeightUpdate, tensors: dict[str, Tensor]) -> None:
        """Put an adapter in, or a new version in the old one's place. Raises UpdateError, nothing changed."""
        assert update.adapter is not None
        old = self._loaded.get(update.adapter)
        number = self._numbers + 1 if old is None else old.number
        folder = tempfile.TemporaryDirectory(prefix="headway-adapter-")
        try:
            self._write(Path(folder.name), update, tensors)
            await llm.add_lora(_lora_request(update.adapter, number, folder.name, load_inplace=True))
        except Exception as error:
            folder.cleanup()
            message = f"adapter {update.adapter}, version {update.version}, was refused: {last_line(error)}"
            raise UpdateError(message) from None
        self._numbers = max(self._numbers, number)
        self._epochs += 1
        self._loaded[update.adapter] = _Loaded(number, update.version, update.fingerprint, folder, self._epochs)
        if old is not None:
            old.folder.cleanup()

    async def drop(self, llm: Any, name: str) -> None:
        loaded = self._loaded.pop(name)
        await llm.remove_lora(loaded.number)
        loaded.folder.cleanup()

    def close(self) -> None:
        for loaded in self._loaded.values():
            loaded.folder.cleanup()

    def _write(self, folder: Path, update: WeightUpdate, tensors: dict[str, Tensor]) -> None:
        """An adapter folder as PEFT lays it out."""
        ranks = {tensor.shape[0] for name, tensor in tensors.items() if ".lora_A" in name}
        if len(ranks) != 1:
            raise UpdateError("its lora_A tensors do not have one rank in common")
        alpha = update.transport.get("alpha", self._lora.alpha if self._lora else None)
        if not isinstance(alpha, int | float):
            raise UpdateError("its alpha is unknown; start the server with --model.lora.alpha or send transport.alpha")
        targets = {name.rpartition(".lora_")[0].rpartition(".")[2] for name in tensors}
        config = {"peft_type": "LORA", "r": ranks.pop(), "lora_alpha": alpha, "target_modules": sorted(targets)}
        save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, folder / WEIGHTS)
        (folder / CONFIG).write_bytes(msgspec.json.encode({**config, "bias": "none"}))


def _lora_request(name: str, number: int, folder: str, **fields: Any) -> Any:
    from vllm.lora.request import LoRARequest

    return LoRARequest(name, number, folder, **fields)
