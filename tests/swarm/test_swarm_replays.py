"""Episodes played again in worker processes: environments that block or crash hold up nobody else."""

import asyncio
from pathlib import Path

import pytest
from swarm_run import Swarm, make_swarm

from headway.config.orchestrator import EnvSettings
from headway.core.episodes import Episode
from headway.models.tiny import resolve_model
from headway.swarm.trust.play import NotJudgedError, PoolPlayer

ENVIRONMENT = f"{Path(__file__).parent / 'patient_text.py'}:PatientText"


@pytest.fixture(scope="module")
def swarm() -> Swarm:
    return make_swarm()


@pytest.mark.parametrize("crashes", [False, True])
def test_a_slow_environment_does_not_hold_up_the_service(swarm: Swarm, tmp_path: Path, crashes: bool) -> None:
    order = swarm.order(0)
    sent = swarm.workers["float32"].honest(order)
    env = EnvSettings(id=ENVIRONMENT, name="reverse-text", args={"folder": str(tmp_path), "crashes": crashes})

    async def main() -> Episode:
        player = PoolPlayer(env, resolve_model("tiny"), "auto", repeats=True)
        try:
            playing = asyncio.create_task(player.play_again(order.request(0), sent.episodes[0], order.context))
            await player.start()
            # An environment on this event loop would wait for the file for ever.
            while not (tmp_path / "asked").exists():  # noqa: ASYNC110 - of another process
                await asyncio.sleep(0.01)
            (tmp_path / "go").touch()
            return await playing
        finally:
            await player.close()

    played = asyncio.run(asyncio.wait_for(main(), 240))
    if crashes:
        assert played.error is not None and played.error.kind == "worker"
    else:
        claimed = sent.episodes[0].traces[0]
        assert played.error is None and played.reward == sent.episodes[0].reward
        assert [node.token_ids for node in played.traces[0].nodes] == [node.token_ids for node in claimed.nodes]


def test_a_service_that_ends_judges_nobody(swarm: Swarm, tmp_path: Path) -> None:
    order = swarm.order(0)
    claimed = swarm.workers["float32"].honest(order).episodes[0]
    env = EnvSettings(id=ENVIRONMENT, name="reverse-text", args={"folder": str(tmp_path)})

    async def main() -> None:
        player = PoolPlayer(env, resolve_model("tiny"), "auto", repeats=True)
        await player.start()
        playing = asyncio.create_task(player.play_again(order.request(0), claimed, order.context))
        while not (tmp_path / "asked").exists():  # noqa: ASYNC110 - of another process
            await asyncio.sleep(0.01)
        closing = asyncio.create_task(player.close())
        with pytest.raises(NotJudgedError):
            await playing
        (tmp_path / "go").touch()
        await closing

    asyncio.run(asyncio.wait_for(main(), 240))
