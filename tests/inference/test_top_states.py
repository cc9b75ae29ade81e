"""Last hidden states that the embedded engine shows: those of the weights, or the adapter, that serve."""

import asyncio
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
from engine_common import FilesystemWeights, forward, make_model, make_service, prompt, request, with_service

from headway.config.shared import LoraSettings
from headway.core.activations import Places, TopStates
from headway.core.runs import RunPaths
from headway.inference.embedded.service import EmbeddedService
from headway.inference.errors import FailedError
from headway.models.adapters.lora import adapter_tensors, merge_adapter
from headway.models.decoder import DecoderLM
from headway.models.passes import in_passes
from headway.transport.weights import make_sender

TOKENS, POSITIONS, COUNT = prompt(40), [0, 17, 39], 5
OTHERS = Places(prompt(9), [4])
PLACES = [OTHERS, Places(TOKENS, POSITIONS), OTHERS]


def check(found: Sequence[TopStates], model: DecoderLM) -> None:
    """Check that states are those of a model, each sequence by itself."""
    first, states, last = found
    assert first[0].tolist() == last[0].tolist() and first[0].shape == (1, COUNT)
    hidden = forward(model, TOKENS).hidden_TD[POSITIONS].detach().numpy()
    indices = np.argsort(-np.abs(hidden), axis=1)[:, :COUNT]
    assert states[0].tolist() == indices.tolist()
    np.testing.assert_allclose(states[1], np.take_along_axis(hidden, indices, 1), rtol=1e-4)


def test_states_are_those_of_a_pass_and_disturb_no_request() -> None:
    model = make_model()

    async def body(service: EmbeddedService) -> None:
        alone = await service.generate(request(prompt(9), max_tokens=60, seed=3))
        running = asyncio.create_task(service.generate(request(prompt(9), max_tokens=60, seed=3)))
        await asyncio.sleep(0)  # it is posted to the engine first
        check(await service.top_states(PLACES, COUNT), model)
        assert (await running).choices[0].token_ids == alone.choices[0].token_ids

    with_service(make_service(make_model()), body)


def test_a_policy_that_is_an_adapter_shows_the_states_of_its_newest_version(tmp_path: Path) -> None:
    from test_engine_updates import adapted_model

    lora = LoraSettings(rank=4)
    sender = make_sender(FilesystemWeights(), RunPaths(tmp_path))

    async def body(service: EmbeddedService) -> None:
        for version, seed in ((1, 5), (2, 6)):
            adapted = adapted_model(lora, seed)
            await service.update(sender.publish(version, adapter_tensors(adapted), adapter="policy"))
            merge_adapter(adapted)
            check(await service.top_states(PLACES, COUNT), adapted)

    with_service(make_service(make_model(), lora=lora), body)


def test_an_engine_that_does_not_serve_shows_nothing() -> None:
    async def body() -> None:
        service = make_service(make_model())
        await service.start()
        await service.close()
        with pytest.raises(FailedError, match="shutting down"):
            await service.top_states(PLACES, COUNT)

    asyncio.run(body())


def test_sequences_are_computed_in_passes_of_bounded_size() -> None:
    assert [len(each) for each in in_passes([9_000, 9, 9_000, 9_000, 7_384, 1], range)] == [2, 1, 2, 1]
    assert [len(each) for each in in_passes([40_000], range)] == [1]
