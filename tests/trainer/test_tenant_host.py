"""A host over HTTP: tenants survive its crashes and their own with the bits of a run by itself, and hostile ones only
harm themselves."""

import shutil
import socket
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import msgspec
import numpy as np
import pytest
from test_tenants import FOUR, alone, batches_of, make_batch, same, tenant_settings
from torch import Tensor

from headway.base.errors import UsageError
from headway.config.host import HostSettings
from headway.config.trainer import TrainSettings
from headway.core.batches import Batch
from headway.core.runs import RunPaths
from headway.core.tenants import HostStatus, TenantJoin, TenantStatus
from headway.core.wire import encode
from headway.launch.tenant import join_from
from headway.models.adapters.peft import read_adapter
from headway.monitor.metrics import read_metrics
from headway.trainer.recorder import Recorder
from headway.trainer.tenants.joining import join_host
from headway.trainer.tenants.loop import TenantLoop
from headway.trainer.tenants.passes import choose_micro_batches, fair_shares
from headway.trainer.tenants.remote import train_at_host
from headway.trainer.tenants.requested import requested_settings
from headway.trainer.tenants.tenant import TenantLimits
from headway.trainer.tenants.trainer import TenantTrainer
from headway.transport.announcements import latest
from headway.transport.control.tokens import write_token
from headway.transport.http_client import AnswerError, HttpClient
from headway.transport.http_thread import HttpThread
from headway.transport.rollouts import BatchSender, RankBatch
from headway.transport.tenants.client import HostClient, SessionOverError, TenantClient, leave
from headway.transport.tenants.service import HostService
from headway.transport.tenants.tenancy import Tenancy

ADMIN, JOIN = "admin-token-of-a-host", "join-token-of-a-host"
STEPS = range(1, 7)


class LiveHost:
    """A host with its service, in threads. `kill` leaves on disk what `kill -9` would."""

    def __init__(self, folder: Path, **changes: Any) -> None:
        base = {"model": {"path": "tiny"}, "placement": {"device": "cpu"}, "seq_len": 64, "host": changes}
        self.settings = HostSettings.model_validate(base)
        self._folder, self._port, self.now = folder, 0, 0.0
        self.start()

    def start(self) -> None:
        self.loop = TenantLoop(self.settings, self._folder, clock=lambda: self.now)
        service = HostService(self.loop, ADMIN, JOIN, 1 << 20)
        self._http = HttpThread(service.app, "127.0.0.1", self._port, "host")
        self._port, self.url = self._http.port, f"http://127.0.0.1:{self._http.port}"
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, args=(self.loop, self._ended), daemon=True)
        self._thread.start()

    @staticmethod
    def _run(loop: TenantLoop, ended: threading.Event) -> None:
        while not ended.is_set():
            loop.turn()

    def kill(self) -> None:
        self._ended.set()
        self._thread.join()
        self._http.close()

    def status(self) -> HostStatus:
        client = HostClient(self.url, ADMIN)
        try:
            return client.status()
        finally:
            client.close()

    def tenant(self, name: str) -> TenantStatus:
        return next(tenant for tenant in self.status().tenants if tenant.name == name)

    def join(self, name: str, settings: TrainSettings, token: str = "") -> TenantClient:
        token = token or f"token-of-{name}-and-more"
        client = HostClient(self.url, JOIN)
        joined = client.join(name, TenantJoin(requested_settings(settings), token))
        client.close()
        return TenantClient(self.url, name, token, joined.session)


@pytest.fixture
def host(tmp_path: Path) -> Iterator[LiveHost]:
    host = LiveHost(tmp_path / "tenants")
    yield host
    host.kill()


def own_settings(name: str) -> TrainSettings:
    settings = tenant_settings(**FOUR[name])
    checkpoints = settings.trainer.checkpoints.model_copy(update={"interval": 2})
    return settings.model_copy(update={"trainer": settings.trainer.model_copy(update={"checkpoints": checkpoints})})


def make_run(folder: Path, name: str) -> RunPaths:
    """A tenant's folder with its batches, as an orchestrator leaves them."""
    paths = RunPaths(folder / name)
    write_token(paths)
    for batch in batches_of(name, STEPS):
        BatchSender(paths).send(Batch(batch.step, [batch.micro_batches], batch.counts), b"{}")
    return paths


def steps_of(paths: RunPaths) -> list[int]:
    file = paths.metrics / "trainer.jsonl"
    return [line["step"] for line in read_metrics(file)] if file.exists() else []


def exported(paths: RunPaths) -> dict[str, Tensor]:
    return read_adapter(paths.exports / "step_000006_adapter")[1]


def train_by_hand(client: TenantClient, batches: list[RankBatch]) -> dict[str, Tensor]:
    """Train batches as a tenant's process does, without one. Returns the last adapter."""
    for batch in batches:
        client.submit(encode(batch))
        while client.outcome(batch.step) is None:
            pass
    return torch_load(client.adapter(batches[-1].step))


def torch_load(data: bytes) -> dict[str, Tensor]:
    from safetensors.torch import load

    return load(data)


def when(condition: Callable[[], bool], act: Callable[[], None]) -> threading.Thread:
    def wait() -> None:
        while not condition():
            time.sleep(0.005)
        act()

    thread = threading.Thread(target=wait, daemon=True)
    thread.start()
    return thread


def test_a_killed_host_and_a_killed_trainer_change_nothing(
    host: LiveHost, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings, paths = own_settings("anna"), make_run(tmp_path / "elsewhere", "anna")
    expected, metrics = alone(settings, batches_of("anna", STEPS))
    sent, request = list[bytes](), HttpClient._try

    def note(self: HttpClient, method: str, route: str, body: bytes | None, headers: dict[str, str]) -> Any:
        status, answer = request(self, method, route, body, headers)
        sent.append(f"{route} {headers} ".encode() + (body or b"") + answer)
        return status, answer

    monkeypatch.setattr(HttpClient, "_try", note)
    tenancy = Tenancy(host.url, "anna", JOIN)
    record = Recorder.record

    def die_at_four(self: Recorder, step: int, *rest: Any) -> None:
        if step == 4:
            raise RuntimeError("killed")
        record(self, step, *rest)

    other = host.join("ben", own_settings("ben"))
    beside = ThreadPoolExecutor(1).submit(train_by_hand, other, batches_of("ben"))
    monkeypatch.setattr(Recorder, "record", die_at_four)
    with pytest.raises(RuntimeError, match="killed"):
        train_at_host(settings, paths, tenancy)
    monkeypatch.setattr(Recorder, "record", record)
    assert paths.complete_checkpoints() == [2]
    assert same(beside.result(), alone(own_settings("ben"), batches_of("ben"))[0])
    shutil.rmtree(paths.batch(1))  # as an orchestrator does: the run has to continue, and not to begin again
    killer = when(lambda: steps_of(paths)[-1:] == [5], lambda: (host.kill(), host.start()))  # type: ignore[arg-type]
    assert train_at_host(settings, paths, tenancy)
    killer.join()
    assert same(exported(paths), expected)
    lines = list(read_metrics(paths.metrics / "trainer.jsonl"))
    assert [line["step"] for line in lines] == list(STEPS)
    # Neither names a path of its own: they may be on two machines.
    assert not any(str(tmp_path).encode() in data for data in sent) and len(sent) > 20
    announced = latest(paths)
    assert announced is not None and announced.transport == {"type": "host", "alpha": settings.model.lora.alpha}  # type: ignore[union-attr]
    assert not paths.version(announced.version).exists()
    assert [line["loss"] for line in lines] == [pytest.approx(line["loss"], abs=0) for line in metrics]


def test_a_host_started_again_knows_its_tenants(host: LiveHost) -> None:
    client = host.join("ben", own_settings("ben"))
    train_by_hand(client, batches_of("ben", range(1, 3)))
    client.checkpoint(2)
    before = host.loop.grants()
    host.kill()
    host.start()
    assert host.loop.grants() == before
    assert host.tenant("ben").step == 2
    with pytest.raises(SessionOverError):
        client.beat()


def test_a_hostile_tenant_harms_nobody_else(host: LiveHost) -> None:
    expected, _ = alone(own_settings("ben"), batches_of("ben"))
    good, bad = host.join("ben", own_settings("ben")), host.join("anna", own_settings("anna"))
    poisoned = make_batch(1, [[9, 17]], seed=0)
    poisoned.micro_batches[0].advantages[3] = np.nan
    requests: dict[str, Callable[[], object]] = {
        "advantages": lambda: bad.submit(encode(poisoned)),
        "next batch": lambda: bad.submit(encode(make_batch(7, [[9]], seed=0))),
        "tokens, and a forward pass": lambda: bad.submit(encode(make_batch(1, [[65]], seed=0))),
        "larger than": lambda: bad.submit(bytes(2 << 20)),
        "no batch": lambda: bad.submit(b"\x93not msgpack"),
        "no checkpoint of step 9": lambda: bad.checkpoint(9),
        "no adapter of step 9": lambda: bad.adapter(9),
    }
    for reason, send in requests.items():
        with pytest.raises(AnswerError, match=reason):
            send()
    assert host.tenant("anna").refused == len(requests)
    assert "adapter of step 9" in host.tenant("anna").last_refusal
    for _ in range(50):  # a flood of what would be refused, while the other trains
        with pytest.raises(AnswerError):
            bad.submit(encode(poisoned))
    assert same(train_by_hand(good, batches_of("ben")), expected)
    assert host.tenant("ben").refused == 0


def test_tokens_open_their_own_doors_only(host: LiveHost) -> None:
    host.join("ben", own_settings("ben"))
    host.join("anna", own_settings("anna"), token="the-token-of-anna")
    for token in ("the-token-of-anna", JOIN, "", "wrong"):
        http = HttpClient(host.url, token)
        for method, route in (("GET", ""), ("POST", "/batches"), ("GET", "/checkpoints/0"), ("DELETE", "")):
            with pytest.raises(AnswerError) as refused:
                http.request(method, f"/v1/tenants/ben{route}", b"")
            assert refused.value.status == 401
        with pytest.raises(AnswerError, match="admin token"):
            http.request("GET", "/v1/status")
    assert host.tenant("ben").refused == 16
    with pytest.raises(UsageError, match="another run has this name"):
        host.join("ben", own_settings("ben"), token="the-token-of-anna")
    with pytest.raises(AnswerError, match="join token"):
        HttpClient(host.url, "wrong").request("POST", "/v1/tenants/eve/join", b"")
    # A name that is a word of routes opens no other doors.
    host.join("join", own_settings("dan"), token="the-token-of-join")
    for method in ("GET", "DELETE"):
        with pytest.raises(AnswerError, match="token of this tenant"):
            HttpClient(host.url, JOIN).request(method, "/v1/tenants/join")
    assert host.tenant("join").state == "waiting"
    for name in ("..", "Ben", "a" * 41, "a%2Fb"):
        with pytest.raises(AnswerError):
            HttpClient(host.url, JOIN).request("POST", f"/v1/tenants/{name}/join", b"")


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"model__path": "tiny-llama"}, "model.path must be that of the trainer"),
        ({"model__lora__rank": 65}, "rank must be at most 64"),
        ({"seq_len": 65}, "seq_len must be at most 64"),
        ({"model__lora__targets": ["q_proj", "experts"]}, 'targets must not have "experts"'),
        ({"model__lora__dropout": 0.1}, "dropout must be 0"),
        ({"trainer__optim__type": "custom", "trainer__optim__path": "evil.py:Evil"}, "does not run at a host"),
    ],
)
def test_a_host_refuses_with_a_reason(host: LiveHost, changes: dict[str, Any], reason: str) -> None:
    settings = msgspec.json.decode(requested_settings(own_settings("anna")))
    for key, value in changes.items():
        *path, last = key.split("__")
        section = settings
        for part in path:
            section = section[part]
        section[last] = value
    join = TenantJoin(msgspec.json.encode(settings).decode(), "token-of-somebody")
    with pytest.raises(UsageError, match=reason):
        HostClient(host.url, JOIN).join("anna", join)
    assert host.status().tenants == []


def test_a_full_host_refuses_and_keeps_who_is_there(tmp_path: Path) -> None:
    host = LiveHost(tmp_path, tenants=1, adapter_memory_gb=2e-3)
    try:
        with pytest.raises(UsageError, match="MiB are free here"):
            host.join("cora", tenant_settings(model__lora__rank=64))
        client = host.join("anna", own_settings("anna"))
        with pytest.raises(UsageError, match="no place for more"):
            host.join("ben", own_settings("ben"))
        with pytest.raises(UsageError, match="files"):
            HostClient(host.url, JOIN).join(
                "anna", TenantJoin(requested_settings(own_settings("anna")), "token-of-anna-and-more", {"x": b""})
            )
        assert client.beat().step == 0
    finally:
        host.kill()


def test_a_body_that_is_too_large_is_refused_before_it_is_read(host: LiveHost) -> None:
    host.join("ben", own_settings("ben"))
    address = urlsplit(host.url)
    head = "POST /v1/tenants/{}/{} HTTP/1.1\r\nHost: host\r\nAuthorization: Bearer {}\r\nContent-Length: {}\r\n\r\n"
    joined = host.join("dan", own_settings("dan"))
    for name, route, token in (
        ("dan", f"batches?session={joined._session}", "token-of-dan-and-more"),
        ("eve", "join", JOIN),
    ):
        with socket.create_connection((address.hostname, address.port), timeout=30) as connection:
            connection.sendall(head.format(name, route, token, (1 << 20) + 1).encode())
            assert connection.recv(4096).startswith(b"HTTP/1.1 413 ")
    assert host.tenant("dan").refused == 1 and "request_mb" in host.tenant("dan").last_refusal


def test_new_names_join_so_often_only_and_those_that_were_dropped_are_forgotten_in_the_end(tmp_path: Path) -> None:
    host = LiveHost(tmp_path, tenants=2)
    try:
        for number in range(3):
            host.join(f"old-{number}", own_settings("ben"))
            host.now += 3601.0
            while host.tenant(f"old-{number}").state != "dropped":
                time.sleep(0.005)
        host.join("anna", own_settings("anna"))
        for number in range(16):
            host.join(f"new-{number}", own_settings("ben"))
            leave(host.url, f"new-{number}", f"token-of-new-{number}-and-more")
        with pytest.raises(UsageError, match="20 joins within 60 s are too many"):
            host.join("one-more", own_settings("ben"))
        host.join("anna", own_settings("anna"))  # who is there comes back
        assert [tenant.name for tenant in host.status().tenants] == ["anna", "old-1", "old-2"]
        assert sorted(folder.name for folder in tmp_path.iterdir()) == ["anna", "old-1", "old-2"]
    finally:
        host.kill()


def test_a_silent_tenant_is_paused_and_then_dropped(host: LiveHost, tmp_path: Path) -> None:
    paths, settings = make_run(tmp_path, "dan"), own_settings("dan")
    tenancy = Tenancy(host.url, "dan", JOIN)
    join_host(settings, paths, tenancy)
    for silence, state in ((61.0, "silent"), (3601.0, "dropped")):
        host.now += silence
        while host.tenant("dan").state != state:
            time.sleep(0.01)
    assert host.loop.grants() == []
    with pytest.raises(UsageError, match="another run has this name"):
        host.join("dan", settings, token="somebody-elses-token")
    join_host(settings, paths, tenancy)
    assert host.tenant("dan").state == "waiting"


def test_a_run_that_starts_while_its_host_is_down_waits_for_it(host: LiveHost, tmp_path: Path) -> None:
    paths, settings = make_run(tmp_path, "dan"), own_settings("dan")
    host.kill()
    with ThreadPoolExecutor(1) as pool:
        joined = pool.submit(join_from, settings, paths, Tenancy(host.url, "dan", JOIN))
        time.sleep(0.2)
        host.start()
        joined.result(timeout=60)
    assert host.tenant("dan").state == "waiting"


def test_the_batch_that_breaks_a_pass_stops_its_tenant_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    expected = {name: alone(tenant_settings(**FOUR[name]), batches_of(name))[0] for name in ("anna", "dan")}
    trainer = TenantTrainer(tenant_settings(seq_len=64))
    for name in ("anna", "ben", "dan"):
        trainer.join(name, tenant_settings(**FOUR[name]))
    ben, train = trainer.tenants["ben"], trainer._train

    def break_on_ben(blocks: Any) -> Any:
        reports = train(blocks)
        if any(block.tenant is ben for block in blocks):
            raise RuntimeError("out of memory")
        return reports

    monkeypatch.setattr(trainer, "_train", break_on_ben)
    reports = []
    for step in range(3):
        for name in ("anna", "ben", "dan"):
            if trainer.tenants[name].stopped is None:
                trainer.submit(name, batches_of(name)[step])
        reports += trainer.run()
    assert ben.stopped is not None and "out of memory" in ben.stopped
    for name, adapter in expected.items():
        assert same(dict(trainer.tenants[name].adapter.peft_tensors()), adapter)


def test_passes_are_shared_by_weight_with_a_floor() -> None:
    assert fair_shares({"a": 3, "b": 1}, 0) == {"a": 0.75, "b": 0.25}
    assert fair_shares({"a": 1e9, "b": 1e-9}, 0.1)["b"] == pytest.approx(0.1)
    assert fair_shares({"a": 5, "b": 1, "c": 1}, 0.5) == pytest.approx(dict.fromkeys("abc", 1 / 3))
    trainer = TenantTrainer(tenant_settings(seq_len=64), limits=TenantLimits(waiting_batches=1))
    for name, weight in (("anna", 3.0), ("ben", 1.0)):
        tenant = trainer.join(name, tenant_settings(**FOUR["anna"]), weight=weight)
        trainer.submit(name, make_batch(1, [[16]] * 40, seed=1))
    tokens = dict.fromkeys(trainer.tenants, 0)
    for _ in range(8):
        for tenant, batch, micro in choose_micro_batches(trainer.tenants.values(), 64):
            tokens[tenant.name] += sum(micro.lengths)
            batch.done += 1
    assert tokens == {"anna": 384, "ben": 128}
