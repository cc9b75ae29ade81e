"""The fleet on a simulated clock: joiners, leavers, the slow, the dead, and those that serve something else."""

import asyncio
import json
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest

from headway.base.errors import HeadwayError
from headway.core.protocol import EngineState, WeightReply, WeightUpdate
from headway.core.runs import RunPaths
from headway.orchestrator.fleet.engine import STRIKES
from headway.orchestrator.fleet.fleet import MAX_REFUSALS, SLOW_SLACK_SECONDS, Fleet
from headway.orchestrator.fleet.membership import engine_finder
from headway.plan.virtual_time import run_virtually
from headway.transport.control.folder import FolderControl
from headway.transport.inference import EngineError


class Script:
    """An engine that does as it is told."""

    def __init__(self) -> None:
        self.version, self.fingerprint = 0, "initial"
        self.adapters: dict[str, int] = {}
        self.dead = False
        self.lies = False
        self.refuses = False
        self.update_seconds = 0.1
        self.updates: list[int] = []
        self.kv_usage = 0.5

    async def state(self) -> EngineState:
        await asyncio.sleep(0.001)
        if self.dead:
            raise EngineError(0, "connection refused", retryable=True)
        return EngineState(
            self.version, self.fingerprint, 2, 1, self.kv_usage, 1000, 3, 10.0, 100, adapters=self.adapters
        )

    async def update_weights(self, update: WeightUpdate) -> WeightReply:
        await asyncio.sleep(self.update_seconds)
        if self.dead:
            raise EngineError(0, "connection reset", retryable=True)
        self.updates.append(update.version)
        if self.refuses:
            raise EngineError(409, f"version {update.version} was refused: layer 1 is suspect", retryable=False)
        if self.lies:
            return WeightReply(update.version, "other", 0.1, 100)
        self.version, self.fingerprint = update.version, update.fingerprint
        return WeightReply(update.version, update.fingerprint, 0.1, 100)

    async def load_adapter(self, update: WeightUpdate) -> WeightReply:
        assert update.adapter is not None
        self.updates.append(update.version)
        self.adapters[update.adapter] = update.version
        return WeightReply(update.version, update.fingerprint, 0.1, 100)

    async def close(self) -> None:
        pass


def update(version: int, fingerprint: str | None = None, adapter: str | None = None) -> WeightUpdate:
    return WeightUpdate(version, fingerprint or f"f{version}", {"type": "none"}, adapter=adapter)


def with_fleet(scripts: dict[str, Script], use: Callable[[Fleet], Awaitable[None]]) -> None:
    """Run `use` while the fleet watches over whatever is in `scripts`."""

    async def main() -> None:
        fleet = Fleet(lambda: {name: f"http://{name}" for name in scripts}, lambda url: scripts[url[7:]])
        watch = asyncio.ensure_future(fleet.watch())
        try:
            await use(fleet)
        finally:
            watch.cancel()
            await asyncio.gather(watch, return_exceptions=True)
        assert not fleet.engines

    run_virtually(main())


def test_nobody_serves_before_there_are_weights_and_joiners_get_them_first() -> None:
    scripts = {"a": Script()}

    async def use(fleet: Fleet) -> None:
        await asyncio.sleep(5)
        assert fleet.choose("g") == [] and fleet.version == -1
        await fleet.publish(update(0))
        await asyncio.sleep(1)
        assert fleet.choose("g") == ["http://a"] and fleet.version == 0
        await fleet.publish(update(3))
        scripts["b"] = Script()
        scripts["b"].update_seconds = 5.0
        await asyncio.sleep(3)
        assert fleet.choose("g") == ["http://a"], "the joiner is still loading"
        await asyncio.sleep(10)
        assert sorted(fleet.choose("g")) == ["http://a", "http://b"] and scripts["b"].version == 3
        del scripts["a"]
        await asyncio.sleep(3)
        assert fleet.choose("g") == ["http://b"]

    with_fleet(scripts, use)


def test_an_update_reaches_all_and_reports_its_cost() -> None:
    scripts = {"a": Script(), "b": Script()}

    async def use(fleet: Fleet) -> None:
        await fleet.publish(update(0))
        await asyncio.sleep(3)
        replies = await fleet.publish(update(1))
        assert [reply.version for reply in replies] == [1, 1] and fleet.version == 1
        # The trainer went back to a checkpoint and made version 1 again.
        await fleet.publish(update(1, "other bits"))
        assert {script.fingerprint for script in scripts.values()} == {"other bits"}

    with_fleet(scripts, use)


def test_an_engine_that_has_the_weights_already_is_left_alone() -> None:
    script = Script()
    script.version, script.fingerprint = 4, "f4"

    async def use(fleet: Fleet) -> None:
        await fleet.publish(update(4))
        await asyncio.sleep(3)
        assert fleet.version == 4 and script.updates == []

    with_fleet({"a": script}, use)


def test_adapters_are_pushed_as_adapters() -> None:
    script = Script()

    async def use(fleet: Fleet) -> None:
        for announced in (update(1, "x", "policy"), update(1, "y", "policy"), update(2, "z", "policy")):
            await fleet.publish(announced)
            await asyncio.sleep(3)
        assert script.updates == [1, 1, 2] and fleet.version == 2

    with_fleet({"a": script}, use)


def test_a_slow_engine_does_not_hold_back_the_others_beyond_the_bound() -> None:
    fast, slow = Script(), Script()

    async def use(fleet: Fleet) -> None:
        await fleet.publish(update(0))
        await asyncio.sleep(3)
        fast.update_seconds, slow.update_seconds = 2.0, 60.0
        clock = asyncio.get_running_loop().time
        began = clock()
        await fleet.publish(update(1))
        assert clock() - began == pytest.approx(2 * 2.0 + SLOW_SLACK_SECONDS, abs=0.1)
        assert fleet.choose("g") == ["http://fast"] and fleet.version == 1
        await asyncio.sleep(60)
        assert len(fleet.choose("g")) == 2 and slow.version == 1

    with_fleet({"fast": fast, "slow": slow}, use)


def test_until_the_bound_the_oldest_version_is_what_new_episodes_are_pinned_to() -> None:
    fast, slow = Script(), Script()

    async def use(fleet: Fleet) -> None:
        await fleet.publish(update(0))
        await asyncio.sleep(3)
        slow.update_seconds = 4.0
        publishing = asyncio.ensure_future(fleet.publish(update(1)))
        await asyncio.sleep(2)
        assert fast.version == 1 and fleet.version == 0
        await publishing
        assert fleet.version == 1

    with_fleet({"fast": fast, "slow": slow}, use)


def test_a_dead_engine_is_out_and_comes_back_with_current_weights() -> None:
    a, b = Script(), Script()

    async def use(fleet: Fleet) -> None:
        await fleet.publish(update(0))
        await asyncio.sleep(3)
        a.dead = True
        fleet.started("http://a")
        fleet.ended("http://a", engine_failed=True)
        await asyncio.sleep(0.5)
        assert fleet.choose("g") == ["http://b"], "an episode blamed it, so it was looked at at once"
        await fleet.publish(update(1))
        a.dead, a.version, a.fingerprint = False, 0, "initial"
        await asyncio.sleep(60)
        assert len(fleet.choose("g")) == 2 and a.version == 1

    with_fleet({"a": a, "b": b}, use)


def test_a_single_missed_poll_is_forgiven() -> None:
    script = Script()

    async def use(fleet: Fleet) -> None:
        await fleet.publish(update(0))
        await asyncio.sleep(2.5)
        script.dead = True
        await asyncio.sleep(1.1)
        script.dead = False
        assert fleet.choose("g") == ["http://a"]
        await asyncio.sleep(2)
        script.dead = True
        await asyncio.sleep(10)
        assert fleet.choose("g") == []

    with_fleet({"a": script}, use)


def test_an_engine_that_serves_other_weights_gets_no_episodes() -> None:
    honest, liar = Script(), Script()
    liar.lies = True

    async def use(fleet: Fleet) -> None:
        await fleet.publish(update(0))
        await asyncio.sleep(30)
        assert fleet.choose("g") == ["http://honest"]
        liar.lies = False
        await asyncio.sleep(60)
        assert len(fleet.choose("g")) == 2

    with_fleet({"honest": honest, "liar": liar}, use)


def test_weights_that_every_engine_refuses_end_the_run() -> None:
    scripts = {"a": Script(), "b": Script()}

    async def main() -> None:
        fleet = Fleet(lambda: {name: f"http://{name}" for name in scripts}, lambda url: scripts[url[7:]])
        watch = asyncio.ensure_future(fleet.watch())
        await fleet.publish(update(0))
        await asyncio.sleep(3)
        scripts["a"].refuses = True
        await fleet.publish(update(1))
        await asyncio.sleep(120)
        assert fleet.choose("g") == ["http://b"] and len(scripts["a"].updates) > 2 * MAX_REFUSALS
        scripts["b"].refuses = True
        await fleet.publish(update(2))
        await asyncio.sleep(3)
        scripts["b"].refuses = False
        await asyncio.sleep(60)
        assert fleet.choose("g") == ["http://b"], "a few refusals are forgiven"
        scripts["b"].refuses = True
        before = len(scripts["b"].updates)
        await fleet.publish(update(3))
        with pytest.raises(HeadwayError, match=r"every engine has refused.*version 3 was refused: layer 1 is suspect"):
            await watch
        assert len(scripts["b"].updates) == before + MAX_REFUSALS

    run_virtually(main())


def test_an_engine_that_answers_garbage_to_episodes_rests_for_a_while() -> None:
    async def use(fleet: Fleet) -> None:
        await fleet.publish(update(0))
        await asyncio.sleep(3)
        for _ in range(STRIKES):
            fleet.started("http://a")
            fleet.ended("http://a", engine_failed=True)
        await asyncio.sleep(0.1)
        assert fleet.choose("g") == ["http://b"]
        await asyncio.sleep(60)
        assert len(fleet.choose("g")) == 2

    with_fleet({"a": Script(), "b": Script()}, use)


def test_episodes_go_to_the_least_loaded_and_groups_stay_together() -> None:
    async def use(fleet: Fleet) -> None:
        await fleet.publish(update(0))
        await asyncio.sleep(3)
        for group in ("g1", "g1", "g2", "g2"):
            fleet.started(fleet.choose(group)[0])
        assert {name: engine.in_flight for name, engine in fleet.engines.items()} == {"a": 2, "b": 2}
        home = fleet.choose("g1")[0]
        for _ in range(20):
            fleet.started(home)
        assert fleet.choose("g1")[0] != home, "a cached prompt isn't worth a queue"
        load = fleet.load(in_flight=24, finished=7)
        assert load is not None and (load.running, load.waiting, load.kv_usage, load.preemptions) == (4, 2, 0.5, 6)

    with_fleet({"a": Script(), "b": Script()}, use)


def test_engines_are_named_in_settings_or_join_by_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    paths = RunPaths(tmp_path)
    assert list(engine_finder(["http://a:1/"], FolderControl(paths))().values()) == ["http://a:1"]
    find = engine_finder([], FolderControl(paths))
    assert find() == {}
    folder = paths.control / "engines"
    folder.mkdir(parents=True)
    (folder / "one.json").write_text(json.dumps({"url": "http://b:2/", "pid": 4}))
    (folder / "two.json").write_text("half a fi")
    assert find() == {"one": "http://b:2"}
    monkeypatch.delenv("HEADWAY_TOKEN", raising=False)
    assert FolderControl(paths).token is None
    (paths.control / "token").write_text("secret\n")
    assert FolderControl(paths).token == "secret"
    monkeypatch.setenv("HEADWAY_TOKEN", "other")
    assert FolderControl(paths).token == "other"
