"""The control service over a real socket: announcements, membership, collected files, and those without the token."""

import random
from pathlib import Path

import pytest
from control_helpers import ROUTES, TOKEN, Service, check_malformed, decoded, malformed

from headway.base.errors import HeadwayError, UsageError
from headway.core.control import LEASE_SECONDS, Member
from headway.core.protocol import WeightUpdate
from headway.core.runs import RunPaths
from headway.monitor.tail import LineTail
from headway.transport.control import client as client_module
from headway.transport.control.client import JoinedControl
from headway.transport.control.collected import CollectedFiles
from headway.transport.control.folder import FolderControl
from headway.transport.control.sending import FileSender


def engine(name: str, started: float = 1.0, host: str = "h1") -> Member:
    return Member(name, "engine", host, started, "http://10.0.0.7:8000")


def test_engines_join_heartbeat_leave_and_expire_where_the_orchestrator_looks(service: Service) -> None:
    folder, client = FolderControl(service.paths), service.client()
    assert not client.beat(engine("a")).stop
    client.beat(engine("b"))
    assert folder.engines() == {"a": "http://10.0.0.7:8000", "b": "http://10.0.0.7:8000"}
    service.clock.now += LEASE_SECONDS
    client.beat(engine("b"))
    service.clock.now += 1
    service.control.expire()
    assert list(folder.engines()) == ["b"], "a said nothing for longer than its lease"
    client.leave(engine("b", started=0.5))
    assert list(folder.engines()) == ["b"], "an older process of that name is not in the run"
    client.leave(engine("b"))
    assert folder.engines() == {}


def test_each_role_hears_what_it_has_to_know(service: Service, tmp_path: Path) -> None:
    client, folder = service.client(), FolderControl(service.paths)
    trainer = Member("trainer", "trainer", "h2", 1.0, checkpoints=[4, 8])
    update = WeightUpdate(8, "f8", {"type": "http", "urls": ["http://10.0.0.2:1"]})
    assert client.latest() is None
    joined = JoinedControl(service.client(), RunPaths(tmp_path / "own"), "trainer", "trainer-1")
    joined.announce(update)
    joined.close()
    client.beat(trainer)
    client.beat(engine("a"))
    state = client.beat(Member("orchestrator", "orchestrator", "h3", 1.0))
    assert (state.update, state.engines, state.checkpoints) == (update, {"a": "http://10.0.0.7:8000"}, [4, 8])
    assert folder.latest() == client.latest() == update and folder.checkpoints() == [4, 8]
    folder.set_rollouts("tcp://0.0.0.0:5555")
    service.clock.now += 1
    assert client.beat(trainer).rollouts == "tcp://0.0.0.0:5555"
    client.stop()
    assert client.beat(trainer).stop and client.beat(engine("a")).stop, "who asks the service is heard at once"
    folder.finish()
    service.clock.now += 1
    state = client.beat(trainer)
    assert state.stop and state.finished and not state.ended
    assert client.settings("trainer") == b"max_steps = 7\n"


def test_heartbeats_of_many_look_up_requests_once(service: Service, monkeypatch: pytest.MonkeyPatch) -> None:
    client, looked, real = service.client(), [0], FolderControl.stop_asked

    def count(folder: FolderControl) -> bool:
        looked[0] += 1
        return real(folder)

    monkeypatch.setattr(FolderControl, "stop_asked", count)
    for n in range(10):
        client.beat(engine(f"e{n}"))
        client.beat(Member(f"trainer-{n}", "trainer", "h2", 1.0))
    assert looked == [1]
    FolderControl(service.paths).ask_to_stop()
    service.clock.now += 1
    assert client.beat(engine("e0")).stop and looked == [2]


def test_a_joined_process_reads_what_it_heard_last_and_resolves_wildcards(service: Service, tmp_path: Path) -> None:
    FolderControl(service.paths).set_rollouts("tcp://0.0.0.0:5555")
    control = JoinedControl(service.client(), RunPaths(tmp_path / "own"), "trainer", "trainer")
    try:
        assert control.rollouts() == "tcp://127.0.0.1:5555" and control.address == "127.0.0.1"
        assert not control.stop_asked() and not control.finished()
        assert service.control.present("trainer") == ["trainer"]
    finally:
        control.close()
    assert service.control.present("trainer") == []


def test_a_name_that_is_taken_is_refused(service: Service, tmp_path: Path) -> None:
    service.client().beat(engine("a", host="elsewhere"))
    with pytest.raises(HeadwayError, match=r"a is the name of a process on elsewhere.*another --name"):
        JoinedControl(service.client(), RunPaths(tmp_path), "engine", "a", "http://10.0.0.8:1")


def test_whoever_follows_a_collected_file_never_reads_on_in_the_middle_of_a_line(tmp_path: Path) -> None:
    paths = RunPaths(tmp_path)
    files, tail = CollectedFiles(paths), LineTail(paths.metrics / "trainer.jsonl")
    files.write("metrics", "trainer.jsonl", 0, b'{"step":1}\n{"step":2}\n')
    assert len(list(tail.lines())) == 2
    longer = b'{"step":2,"again":true}\n{"step":3}\n'
    files.write("metrics", "trainer.jsonl", 11, longer)  # its sender went back to a checkpoint
    assert b"".join(tail.lines()) == b'{"step":1}\n' + longer


def test_metrics_and_logs_are_collected_whoever_restarts(service: Service, tmp_path: Path) -> None:
    own, client = RunPaths(tmp_path / "own"), service.client()
    for folder in (own.metrics, own.logs):
        folder.mkdir(parents=True)
    (own.metrics / "trainer.jsonl").write_text('{"step": 1}\n{"step": 2}\n')
    (own.logs / "trainer_001.log").write_text("begun\n")
    (own.logs / "trainer-1_001.log").write_text("another rank's\n")
    sender = FileSender(client.http, own, "trainer", "host9")
    sender.send()
    head = service.paths
    assert (head.metrics / "trainer.jsonl").read_text() == '{"step": 1}\n{"step": 2}\n'
    assert client.status().step == 2
    assert [file.name for file in head.logs.iterdir()] == ["host9.trainer_001.log"]
    with (own.metrics / "trainer.jsonl").open("a") as file:
        file.write('{"step": 3}\n')
    (head.metrics / "trainer.jsonl").write_text("")  # the head lost it
    sender.send()
    FileSender(client.http, own, "trainer", "host9").send()  # the trainer was restarted
    assert (head.metrics / "trainer.jsonl").read_text() == (own.metrics / "trainer.jsonl").read_text()
    (own.metrics / "trainer.jsonl").write_text('{"step": 1}\n')  # it went back to a checkpoint
    sender.send()
    assert (head.metrics / "trainer.jsonl").read_text() == '{"step": 1}\n'


def test_an_announcement_made_while_the_service_is_away_arrives_later(
    service: Service, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(client_module.HEARTBEAT_SECONDS, "trainer", 0.01)
    control = JoinedControl(service.client(), RunPaths(tmp_path), "trainer", "trainer")
    real = control.client.http._connection.port
    control.client.http._connection.close()
    control.client.http._connection.port = 1  # nobody listens there
    control.announce(WeightUpdate(3, "f3", {"type": "none"}))
    assert service.client().latest() is None
    control.client.http._connection.port = real
    while service.client().latest() is None:
        pass
    control.close()
    assert service.client().latest() == WeightUpdate(3, "f3", {"type": "none"})


def test_a_service_that_was_started_again_hears_of_the_version_that_a_trainer_serves(
    service: Service, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(client_module.HEARTBEAT_SECONDS, "trainer", 0.01)
    update = WeightUpdate(3, "f3", {"type": "http", "urls": []})
    control = JoinedControl(service.client(), RunPaths(tmp_path), "trainer", "trainer")
    control.announce(update)
    FolderControl(service.paths).clear()
    assert service.client().latest() is None, "its address may have gone with the trainer"
    service.control._id = "another"
    while service.client().latest() is None:
        pass
    control.close()
    assert service.client().latest() == update
    FolderControl(service.paths).announce(WeightUpdate(4, "f4", {"type": "filesystem", "path": "x"}))
    FolderControl(service.paths).clear()
    assert service.client().latest() == WeightUpdate(4, "f4", {"type": "filesystem", "path": "x"}), "files stay"


@pytest.mark.parametrize(("method", "route"), ROUTES)
def test_without_the_token_there_is_nothing_but_401(service: Service, method: str, route: str) -> None:
    before = service.files()
    for token in (None, "", "wrong", TOKEN[:-1], TOKEN + "x"):
        status, body = service.call(method, route, b"{}" if method != "GET" else None, token)
        assert status == 401 and body == b'{"error": "this service demands the run\'s token"}'
    assert service.files() == before


def test_a_thousand_malformed_messages_change_nothing(service: Service) -> None:
    client, rng = service.client(), random.Random(0)
    client.beat(engine("a"))
    before = service.files()
    for message in malformed(1000, rng):
        check_malformed(message, service.call(message.method, message.route, message.body)[0])
    files = service.files()
    files.pop("logs/a_001.log", None)  # an empty file: nothing was written beyond its end
    assert files == before
    assert [m["name"] for m in decoded(service.call("GET", "/v1/status"))["members"]] == ["a"]  # type: ignore[index]


def test_a_client_without_a_token_is_told_where_to_put_one(service: Service) -> None:
    with pytest.raises(UsageError, match="HEADWAY_TOKEN_FILE"):
        service.client("")
    with pytest.raises(UsageError, match="demands the run's token"):
        service.client("wrong").wait()
    with pytest.raises(UsageError, match="not the address of a run"):
        client_module.ControlClient("outputs/run", "x")
