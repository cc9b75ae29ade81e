"""A server under more than it can take, and after very many requests."""

import asyncio
import gc
import json
import shutil
from pathlib import Path

import aiohttp
import psutil
import pytest
from engine_common import make_model, make_service, prompt, request, until
from engine_serving import EmbeddedServer, start_server
from safetensors.torch import load_file, save_file

from headway.base.errors import HeadwayError
from headway.config.inference import InferenceSettings, ServeSettings
from headway.core.protocol import GenerateRequest, SamplingParams
from headway.inference.embedded.load import load_service, size_engine
from headway.inference.errors import BusyError
from headway.transport.inference import EngineError, InferenceClient


def test_beyond_the_line_requests_get_503_with_retry_after(taught: Path) -> None:
    live = start_server(taught, max_running=2, max_waiting=3)

    async def body() -> None:
        async with InferenceClient(live.url, token=live.token) as client:
            await client.pause()
            params = SamplingParams(max_tokens=4)
            flights = [
                asyncio.create_task(client.generate(GenerateRequest([n], sampling_params=params))) for n in range(8)
            ]
            await until(lambda: sum(flight.done() for flight in flights) >= 3)
            done, waiting = await asyncio.wait(flights, timeout=1)
            assert len(done) == 3 and len(waiting) == 5
            for flight in done:
                error = flight.exception()
                assert isinstance(error, EngineError)
                assert error.status == 503 and error.retryable and error.retry_after
            await client.resume()
            for flight in waiting:
                assert (await flight).choices[0].token_ids

    try:
        asyncio.run(asyncio.wait_for(body(), 200))
    finally:
        live.close()


def test_an_engine_says_when_it_is_full() -> None:
    async def body() -> None:
        service = make_service(make_model(), max_running=1, max_waiting=0)
        await service.start()
        first = asyncio.create_task(service.generate(request(prompt(5), 100)))
        await asyncio.sleep(0)
        with pytest.raises(BusyError):
            await service.generate(request(prompt(5), 100))
        await first
        await service.close()

    asyncio.run(body())


def test_a_cache_too_small_for_one_sequence_names_what_would_do() -> None:
    settings = InferenceSettings(kv_memory_gb=1e-5)
    with pytest.raises(HeadwayError, match=r"raise --inference\.kv_memory_gb to"):
        size_engine(settings, make_model().config, 256, make_model().head_weight().dtype, 0)


def test_a_checkpoint_that_does_not_fit_is_refused_by_name(taught: Path, tmp_path: Path) -> None:
    folder = tmp_path / "broken"
    shutil.copytree(taught, folder)
    tensors = load_file(folder / "model.safetensors")
    gone = tensors.pop("model.norm.weight")
    save_file(tensors | {"model.surplus.weight": gone}, folder / "model.safetensors")
    with pytest.raises(HeadwayError, match=r"missing: model\.norm\.weight.*extra: model\.surplus\.weight"):
        load_service(ServeSettings(seq_len=64), folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"model_type": "mystery"}))
    with pytest.raises(HeadwayError, match=r"mystery.*llama.*qwen3"):
        load_service(ServeSettings(seq_len=64), folder)


@pytest.mark.slow
def test_ten_thousand_requests_leave_memory_flat(embedded: EmbeddedServer) -> None:
    process = psutil.Process()

    async def wave(session: aiohttp.ClientSession, count: int) -> None:
        gate = asyncio.Semaphore(64)

        async def one(number: int) -> None:
            tokens = [number % 200, number // 200 % 200, 1]
            body = {"token_ids": tokens, "sampling_params": {"max_tokens": 2, "seed": number}}
            async with gate, session.post(embedded.url + "/inference/v1/generate", json=body) as reply:
                assert reply.status == 200
                await reply.read()

        await asyncio.gather(*(one(number) for number in range(count)))

    async def body() -> tuple[int, int]:
        async with aiohttp.ClientSession() as session:
            await wave(session, 2000)
            gc.collect()
            before = process.memory_info().rss
            for _ in range(5):
                await wave(session, 2000)
            gc.collect()
            return before, process.memory_info().rss

    before, after = asyncio.run(body())
    assert after - before < 16e6
    assert embedded.service.state().kv_usage == 0 and not embedded.service._engine.active
