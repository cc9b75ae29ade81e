"""A real server on a real socket, and a small model that was taught what to answer."""

import asyncio
import os
import re
import subprocess
import sys
import threading
import time
from dataclasses import dataclass, replace
from itertools import chain
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from aiohttp import web
from damaged_workers import DAMAGE
from engine_common import QWEN3
from vllm_here import vllm_flags

from headway.config.inference import InferenceSettings, ServeSettings
from headway.config.shared import ModelSettings
from headway.core.messages import Message, Tool, ToolCall
from headway.inference.embedded.load import load_service
from headway.inference.embedded.service import EmbeddedService
from headway.inference.server import ServerContext, build_app
from headway.models.attention import PackedPlan
from headway.models.build import build_model
from headway.models.checkpoints.folders import save_checkpoint
from headway.models.packed import PackedTokens
from headway.models.tiny_tokenizer import save_tiny_tokenizer
from headway.rendering.load import load_renderer

TOKEN = "secret"
GREETING = "Hello there, dear friend. How are you?"
WEATHER = Tool("weather", "The weather of a city", {"type": "object", "properties": {"city": {"type": "string"}}})


@dataclass
class LiveServer:
    """`url` is its base address, `token` opens the admin routes, `folder` is its checkpoint."""

    url: str
    token: str
    folder: Path


@dataclass
class EmbeddedServer(LiveServer):
    service: EmbeddedService
    context: ServerContext
    _loop: asyncio.AbstractEventLoop
    _stop: asyncio.Event
    _thread: threading.Thread

    def close(self) -> None:
        self._loop.call_soon_threadsafe(self._stop.set)
        self._thread.join(30)


def start_server(folder: Path, *, seq_len: int = 512, **inference: Any) -> EmbeddedServer:
    """Serve `folder` from a thread of this process."""
    settings = ServeSettings(
        model=ModelSettings(path=str(folder)),
        inference=InferenceSettings(**{"threads": 1, "max_running": 64, **inference}),
        seq_len=seq_len,
    )
    started: list[EmbeddedServer] = []
    ready = threading.Event()

    async def live() -> None:
        service = load_service(settings, folder)
        context = ServerContext(load_renderer(folder), folder.name, TOKEN, service)
        runner = web.AppRunner(build_app(context), handler_cancellation=True, shutdown_timeout=1)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        await service.start()
        url = f"http://127.0.0.1:{runner.addresses[0][1]}"
        stop = asyncio.Event()
        started.append(EmbeddedServer(url, TOKEN, folder, service, context, asyncio.get_running_loop(), stop, thread))
        ready.set()
        await stop.wait()
        await runner.cleanup()
        await service.close()

    thread = threading.Thread(target=lambda: asyncio.run(live()), daemon=True)
    thread.start()
    assert ready.wait(60), "the server did not start"
    return started[0]


@dataclass
class VllmServer(LiveServer):
    """`headway serve` with vLLM, in processes of its own. What they say is in `log`."""

    process: subprocess.Popen[bytes]
    log: Path

    def close(self) -> None:
        self.process.terminate()
        assert self.process.wait(60) == 0, self.log.read_text()


def start_vllm(folder: Path, log: Path, *options: str) -> subprocess.Popen[bytes]:
    """Begin to serve `folder`; `vllm_server` waits for it. So several can start side by side."""
    command = [sys.executable, "-m", "headway.cli.main", "serve", str(folder), "--engine", "vllm", "--port", "0"]
    command += ["--seq-len", "512", "--inference.threads", "1", "--inference.max-running", "64"]
    command += [*vllm_flags(), *options]
    here = os.pathsep.join([str(Path(__file__).parent), *filter(None, [os.environ.get("PYTHONPATH")])])
    damage = {DAMAGE: str(log.with_name("damage")), "PYTHONPATH": here}
    environment = os.environ | {"HEADWAY_TOKEN": TOKEN, "PYTHONUNBUFFERED": "1"} | damage
    with log.open("wb") as output:
        return subprocess.Popen(command, stdout=output, stderr=output, env=environment)


def vllm_server(process: subprocess.Popen[bytes], folder: Path, log: Path) -> VllmServer:
    """The server once it answers."""
    while (found := re.search(r"at (http://\S+) \(version", log.read_text())) is None:
        assert process.poll() is None, log.read_text()
        time.sleep(0.2)
    return VllmServer(found[1], TOKEN, folder, process, log)


def teach(folder: Path) -> Path:
    """A checkpoint that greets when it is asked to, and calls the weather tool when it has it."""
    folder.mkdir(parents=True)
    vocab = save_tiny_tokenizer(folder)
    renderer = load_renderer(folder)
    call = ToolCall("call_0", "weather", '{"city": "Paris"}')
    lessons = [
        renderer.render([Message("user", "Greet me"), Message("assistant", GREETING)]),
        renderer.render([Message("user", "Greet me"), Message("assistant", GREETING)], [WEATHER]),
        renderer.render([Message("user", "Is it raining?"), Message("assistant", tool_calls=(call,))], [WEATHER]),
    ]
    sequences = [lesson.token_ids for lesson in lessons]
    ends = tuple(renderer.stop_token_ids)
    model = build_model(
        replace(QWEN3, vocab_size=vocab, width=64, head_dim=32, mlp_width=128, max_len=512, eos_ids=ends)
    )
    packed = PackedTokens(
        torch.tensor(list(chain.from_iterable(sequences))),
        torch.cat([torch.arange(len(s)) for s in sequences]),
        PackedPlan([len(s) for s in sequences]),
    )
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    for _ in range(300):
        logits = model.logits(model(packed).hidden_TD)
        loss = F.cross_entropy(logits[:-1], packed.token_ids_T[1:])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if loss.item() < 0.05:
            break
    save_checkpoint(model, folder.with_name("taught"), files_from=folder)
    return folder.with_name("taught")
