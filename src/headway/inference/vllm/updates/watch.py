"""Watch the residual stream of one sequence as it passes through the layers of vLLM's model."""

from typing import Any

import torch
from torch import Tensor, nn

from headway.inference.vllm.internals import decoder_modules, residual_stream


class StreamWatch:
    """Methods for vLLM's workers that watch one sequence.

    Hooks on modules are called in eager mode only. Where the model is compiled, or its layers are spread over several
    workers, or it is not built as decoders are, nothing is seen, and `headway_seen` says so.
    """

    model_runner: Any
    _headway_watched: "_Watched | None" = None

    def headway_watch(self, token_ids: list[int]) -> None:
        """Wait for `token_ids` to come by, as a whole prompt."""
        self.headway_seen()
        self._headway_watched = _Watched(self.model_runner.get_model(), token_ids)

    def headway_seen(self) -> list[float] | None:
        """The root mean square of the last token's stream after the embedding, each layer and the final norm; None
        where it was not seen. Ends the watch."""
        watched, self._headway_watched = self._headway_watched, None
        return watched.end() if watched is not None else None


class _Watched:
    def __init__(self, model: nn.Module, token_ids: list[int]) -> None:
        self._ids = torch.tensor(token_ids)
        self._row: int | None = None
        self._seen: list[Tensor] = []
        modules = decoder_modules(model)
        self._modules = len(modules)
        hooks = [self._find, *[self._after_layer] * (len(modules) - 2), self._after_norm]
        self._handles = [module.register_forward_hook(hook) for module, hook in zip(modules, hooks, strict=False)]

    def end(self) -> list[float] | None:
        for handle in self._handles:
            handle.remove()
        return torch.stack(self._seen).tolist() if self._modules and len(self._seen) == self._modules else None

    def _find(self, module: nn.Module, args: Any, output: Any) -> None:
        """A step's tokens are those of all its requests, end to end: ours are somewhere among them."""
        self._row = None
        ids = args[0].flatten()
        if self._seen or len(ids) < len(self._ids):
            return
        begins = (ids.unfold(0, len(self._ids), 1) == self._ids.to(ids.device)).all(1).nonzero()
        if len(begins):
            self._row = int(begins[0]) + len(self._ids) - 1
            self._note(output)

    def _after_layer(self, module: nn.Module, args: Any, output: Any) -> None:
        if self._row is not None:
            self._note(residual_stream(output))

    def _after_norm(self, module: nn.Module, args: Any, output: Any) -> None:
        if self._row is not None:
            self._note(output[0] if isinstance(output, tuple) else output)

    def _note(self, stream: Tensor) -> None:
        assert self._row is not None
        self._seen.append(stream[self._row].float().square().mean().sqrt())
