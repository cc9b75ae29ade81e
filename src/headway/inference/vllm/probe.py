"""Scoring a version's probe with vLLM, and watching the residual stream of its layers meanwhile."""

import uuid
from typing import Any

import torch
from torch import Tensor, nn

from headway.core.protocol import WeightProbe
from headway.inference.probe import Served

_FIRST = -(2**31)
"""The priority of a probe, where vLLM heeds priorities: before everyone's."""


async def serve_probe(llm: Any, probe: WeightProbe) -> list[Served]:
    """What each data-parallel engine of `llm` makes of the probe's tokens. The schedulers, which are paused, go on with
    them first.

    Nothing that is cached is used: vLLM computes a prompt whose logprobs are wanted anew, and with a salt of its own
    nobody else meets its KV.
    """
    from vllm import SamplingParams
    from vllm.inputs import tokens_input
    from vllm.sampling_params import RequestOutputKind

    name = f"probe-{uuid.uuid4().hex}"
    prompt = tokens_input(list(probe.token_ids), cache_salt=name)
    params = SamplingParams(
        max_tokens=1,
        temperature=0.0,
        prompt_logprobs=0,
        detokenize=False,
        ignore_eos=True,
        output_kind=RequestOutputKind.FINAL_ONLY,
    )
    await llm.collective_rpc("headway_watch", args=(list(probe.token_ids),))
    engines: int = llm.vllm_config.parallel_config.data_parallel_size
    first = _first_if_heeded(llm)
    try:
        answers = [
            await llm.add_request(
                f"{name}-{rank}", prompt, params, priority=first, data_parallel_rank=rank if engines > 1 else None
            )
            for rank in range(engines)
        ]
        await llm.resume_generation()
        outputs = [await answer.get() for answer in answers]
    finally:
        # vLLM passes on what the first engine's workers return.
        streams = [*(await llm.collective_rpc("headway_seen"))[:1], *[None] * (engines - 1)]
    dtype = str(llm.model_config.dtype).removeprefix("torch.")
    return [Served(_logprobs(probe, output), dtype, seen) for output, seen in zip(outputs, streams, strict=True)]


def _logprobs(probe: WeightProbe, output: Any) -> list[float]:
    rows = zip(probe.token_ids[1:], output.prompt_logprobs[1:], strict=True)
    return [row[token].logprob for token, row in rows]


def _first_if_heeded(llm: Any) -> int:
    return _FIRST if llm.vllm_config.scheduler_config.policy == "priority" else 0


class StreamWatch:
    """Methods for vLLM's workers: note the residual stream of one sequence as it passes through the layers.

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
        self._handles = []
        self._places = 0
        decoder = _decoder(model)
        if decoder is None:
            return
        places = [decoder.embed_tokens, *decoder.layers, decoder.norm]
        self._places = len(places)
        self._handles.append(places[0].register_forward_hook(self._find))
        self._handles += [layer.register_forward_hook(self._after_layer) for layer in places[1:-1]]
        self._handles.append(places[-1].register_forward_hook(self._after_norm))

    def end(self) -> list[float] | None:
        for handle in self._handles:
            handle.remove()
        return torch.stack(self._seen).tolist() if self._places and len(self._seen) == self._places else None

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
        """vLLM's layers return what they add and the stream that it is added to, so that the next norm can do both."""
        if self._row is not None:
            self._note(output[0] + output[1] if isinstance(output, tuple) else output)

    def _after_norm(self, module: nn.Module, args: Any, output: Any) -> None:
        if self._row is not None:
            self._note(output[0] if isinstance(output, tuple) else output)

    def _note(self, stream: Tensor) -> None:
        assert self._row is not None
        self._seen.append(stream[self._row].float().square().mean().sqrt())


def _decoder(model: nn.Module) -> Any:
    """The part of a model that has an embedding, layers and a final norm; None where there is no such part."""
    for module in model.modules():
        if all(hasattr(module, name) for name in ("embed_tokens", "layers", "norm")):
            return module
    return None
