"""The LoRA adapters that vLLM serves: names, versions, and the folders it reads them from."""

import tempfile
from pathlib import Path
from typing import Any

import msgspec
from safetensors.torch import save_file
from torch import Tensor

from headway.base.errors import HeadwayError
from headway.config.shared import LoraSettings
from headway.core.protocol import WeightUpdate
from headway.inference.adapter_table import AdapterTable
from headway.inference.errors import UpdateError
from headway.inference.vllm.updates.weights import last_line
from headway.models.adapters.files import CONFIG, WEIGHTS
from headway.models.adapters.peft import adapter_settings


class LoadedAdapters(AdapterTable):
    """Adapters by name. `enabled`: vLLM has room for them. `lora` says how they are scaled where an update does not.

    vLLM keeps `most` of them on the device, others in host memory, and reads those that it has forgotten from their
    folders again when a request comes.
    """

    def __init__(self, *, enabled: bool, lora: LoraSettings | None, most: int = 1) -> None:
        super().__init__()
        self.most = most
        self._enabled = enabled
        self._lora = lora
        self._folders: dict[str, tempfile.TemporaryDirectory[str]] = {}

    def request(self, name: str) -> Any:
        """The LoRARequest that goes with requests for `name`; None where that is no adapter."""
        adapter = self._served.get(name)
        return None if adapter is None else _lora_request(name, adapter.slot, self._folders[name].name)

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
        old = self._served.get(update.adapter)
        number = self._epoch + 1 if old is None else old.slot
        folder = tempfile.TemporaryDirectory(prefix="headway-adapter-")
        try:
            self._write(Path(folder.name), update, tensors)
            await llm.add_lora(_lora_request(update.adapter, number, folder.name, load_inplace=True))
        except Exception as error:
            folder.cleanup()
            message = f"adapter {update.adapter}, version {update.version}, was refused: {last_line(error)}"
            raise UpdateError(message) from None
        self._record(update, number)
        if old is not None:
            self._folders[update.adapter].cleanup()
        self._folders[update.adapter] = folder

    async def drop(self, llm: Any, name: str) -> None:
        await llm.remove_lora(self._remove(name).slot)
        self._folders.pop(name).cleanup()

    def close(self) -> None:
        for folder in self._folders.values():
            folder.cleanup()

    def _write(self, folder: Path, update: WeightUpdate, tensors: dict[str, Tensor]) -> None:
        """An adapter folder as PEFT lays it out."""
        settings = adapter_settings(tensors, update.transport, self._lora)
        targets = {name.rpartition(".lora_")[0].rpartition(".")[2] for name in tensors}
        if "kv_b_proj" in targets:
            raise HeadwayError("vLLM would ignore an adapter of kv_b_proj; leave it out of model.lora.targets")
        config = {"peft_type": "LORA", "r": settings.rank, "lora_alpha": settings.alpha, "bias": "none"}
        save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, folder / WEIGHTS)
        (folder / CONFIG).write_bytes(msgspec.json.encode({**config, "target_modules": sorted(targets)}))


def _lora_request(name: str, number: int, folder: str, **fields: Any) -> Any:
    from vllm.lora.request import LoRARequest

    return LoRARequest(name, number, folder, **fields)
