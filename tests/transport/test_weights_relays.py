"""Engines pass versions on: the trainer sends each once, and one that dies on the way costs the others nothing."""

import multiprocessing
import os
import signal
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from typing import Any

import pytest
import torch

from headway.base.errors import HeadwayError
from headway.config.shared import HttpWeights, PointToPointWeights, WeightTransport
from headway.core.protocol import WeightUpdate
from headway.core.runs import RunPaths
from headway.transport.weights import http, make_receiver, make_sender, point_to_point
from headway.transport.weights.publish import WeightSender
from headway.transport.weights.relays import files, pieces
from headway.transport.weights.relays.tree import ancestors

TOKEN = "secret"
CHUNK = 1 << 16
TENSORS = 8
BYTES = TENSORS * 4 * 60_000
ENGINES = 4

context = multiprocessing.get_context("forkserver")


def weights(seed: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {f"w{n}": torch.randn(60_000, generator=generator) for n in range(TENSORS)}


def test_everybody_is_below_somebody_who_came_before() -> None:
    assert ancestors(0) == []
    assert [ancestors(place)[0] for place in range(1, 7)] == [0, 0, 1, 1, 2, 2]
    assert ancestors(1000)[-1] == 0 and len(ancestors(1000)) < 10


def be_an_engine(orders: Connection) -> None:
    """Fetch what is ordered: (update, number of chunks after which to die)."""
    os.environ["HEADWAY_TOKEN"] = TOKEN
    torch.set_num_threads(1)
    http.CHUNK_BYTES = pieces.CHUNK_BYTES = CHUNK
    receiver = make_receiver()
    while (order := orders.recv()) is not None:
        update, chunks = order
        if chunks:
            die_after(chunks)
        try:
            received = {name: tensor.clone() for name, tensor in receiver.receive(update)}
            orders.send(sum(float(tensor.double().sum()) for tensor in received.values()))
        except HeadwayError as error:
            orders.send(str(error))
    receiver.close()


def die_after(chunks: int) -> None:
    """Kill this process when so many chunks have arrived, whichever way."""
    left = [chunks]

    def counting(original: Callable[..., None]) -> Callable[..., None]:
        def count(*arguments: Any) -> None:
            original(*arguments)
            left[0] -= 1
            if left[0] == 0:
                os.kill(os.getpid(), signal.SIGKILL)

        return count

    for kind, name in ((files.ArrivingFiles, "append"), (pieces.ArrivingPieces, "advance")):
        setattr(kind, name, counting(getattr(kind, name)))


class Engine:
    def __init__(self) -> None:
        self.orders, theirs = context.Pipe()
        self.process: ForkServerProcess = context.Process(target=be_an_engine, args=(theirs,), daemon=True)
        self.process.start()
        theirs.close()

    def fetch(self, update: WeightUpdate, die_after: int = 0) -> None:
        self.orders.send((update, die_after))

    def received(self) -> Any:
        """The sum of all weights, what was wrong, or None where the engine has died."""
        try:
            return self.orders.recv()
        except EOFError:
            return None

    def close(self) -> None:
        if self.process.is_alive():
            self.orders.send(None)
        self.process.join(120)


class CountingProxy:
    """Passes TCP connections on to a port, and counts the bytes that come back from there."""

    def __init__(self, port: int) -> None:
        self._target, self.sent = port, 0
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._listener.getsockname()[1]
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        while True:
            theirs, _ = self._listener.accept()
            ours = socket.create_connection(("127.0.0.1", self._target))
            for source, sink, counted in ((theirs, ours, False), (ours, theirs, True)):
                threading.Thread(target=self._copy, args=(source, sink, counted), daemon=True).start()

    def _copy(self, source: socket.socket, sink: socket.socket, counted: bool) -> None:
        try:
            while data := source.recv(1 << 16):
                self.sent += len(data) if counted else 0
                sink.sendall(data)
            sink.shutdown(socket.SHUT_WR)
        except OSError:
            pass


class Trainer:
    """Publishes versions and counts the bytes that it sends: those of its socket, or of its process pairs."""

    def __init__(self, sender: WeightSender) -> None:
        self._sender = sender
        self._proxy: CountingProxy | None = None
        self._paired = 0

    def publish(self, version: int) -> WeightUpdate:
        update = self._sender.publish(version, weights(version).items())
        if update.transport["type"] == "http":
            port = int(update.transport["urls"][0].rpartition(":")[2])
            self._proxy = self._proxy or CountingProxy(port)
            update.transport["urls"] = [f"http://127.0.0.1:{self._proxy.port}"]
        return update

    @property
    def sent(self) -> int:
        return self._proxy.sent if self._proxy else self._paired

    def send_chunks(self, group: Any, chunks: Iterator[torch.Tensor], device: torch.device | None) -> None:
        """Stands in for the transport's own, which it calls."""

        def counted() -> Iterator[torch.Tensor]:
            for chunk in chunks:
                self._paired += chunk.nbytes
                yield chunk

        pieces.send_chunks(group, counted(), device)


@pytest.fixture(scope="module", params=[HttpWeights(), PointToPointWeights()], ids=lambda settings: settings.type)
def settings(request: pytest.FixtureRequest) -> WeightTransport:
    transport: WeightTransport = request.param
    return transport


@pytest.fixture(scope="module")
def trainer(settings: WeightTransport, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Trainer]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HEADWAY_TOKEN", TOKEN)
        patch.setattr(pieces, "CHUNK_BYTES", CHUNK)
        sender = make_sender(settings, RunPaths(tmp_path_factory.mktemp("run")))
        trainer = Trainer(sender)
        patch.setattr(point_to_point, "send_chunks", trainer.send_chunks)
        yield trainer
        sender.close()


@contextmanager
def engines(count: int) -> Iterator[list[Engine]]:
    started = [Engine() for _ in range(count)]
    try:
        yield started
    finally:
        for engine in started:
            engine.close()


def whole(version: int) -> Any:
    return pytest.approx(sum(float(tensor.double().sum()) for tensor in weights(version).values()), abs=1e-9)


def test_the_trainer_sends_each_byte_once_and_a_killed_engine_changes_nothing(trainer: Trainer) -> None:
    with engines(ENGINES) as fleet:
        for version in (1, 2):
            update, before = trainer.publish(version), trainer.sent
            for engine in fleet:
                engine.fetch(update)
            assert [engine.received() for engine in fleet] == [whole(version)] * ENGINES
            # Requests, headers and names travel, too.
            assert BYTES <= trainer.sent - before < 1.05 * BYTES

        update, before = trainer.publish(3), trainer.sent
        victim, *others = fleet
        victim.fetch(update, die_after=6)
        for engine in others:
            engine.fetch(update)
        assert [engine.received() for engine in others] == [whole(3)] * 3
        assert victim.received() is None
        with engines(1) as (restarted,):
            restarted.fetch(update)
            assert restarted.received() == whole(3)
        # The one that died and the two below it asked the trainer, each for a version at most: what was on its way to
        # the dead one counts as sent. The fourth and the restarted one were served by engines.
        assert trainer.sent - before < 3.05 * BYTES


def test_what_an_engine_spoiled_is_refused_and_comes_from_the_trainer_next_time(
    trainer: Trainer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In one process: the first of two receivers passes on other bytes than it got."""
    monkeypatch.setattr(http, "CHUNK_BYTES", CHUNK)
    update = trainer.publish(9)
    first, second = make_receiver(), make_receiver()
    list(first.receive(update))
    (relay,) = first._memory.relays.values()
    if isinstance(relay, pieces.PieceRelay):
        assert relay._held is not None
        relay._held.pieces[0][0][5] += 1
    else:
        assert isinstance(relay, files.FileRelay) and relay._held is not None
        file, size = relay._held._files["rank_00000.safetensors"]
        os.pwrite(file.fileno(), b"\x55", size - 3)
    with pytest.raises(HeadwayError, match="differ in w"):
        list(second.receive(update))
    assert {name for name, _ in second.receive(update)} == set(weights(9))
    for receiver in (first, second):
        receiver.close()


def test_only_those_with_the_token_get_weights_from_an_engine(tmp_path: Path) -> None:
    from headway.transport.http_client import AnswerError, HttpClient

    relay = files.FileRelay("127.0.0.1", TOKEN)
    held, _ = relay.hold(4, tmp_path)
    held.start("manifest.json", 5)
    held.append("manifest.json", b"hello")
    route = "/v1/versions/4/manifest.json"
    assert HttpClient(relay.url, TOKEN).request("GET", route, span=(1, 4)) == b"ell"
    for token, path, status in (("other", route, 401), (None, route, 401), (TOKEN, route, 416)):
        with pytest.raises(AnswerError) as refused:
            HttpClient(relay.url, token).request("GET", path)
        assert refused.value.status == status
    with pytest.raises(AnswerError, match="404"):
        HttpClient(relay.url, TOKEN).request("GET", "/v1/versions/5/manifest.json", span=(0, 2))
    relay.close()
