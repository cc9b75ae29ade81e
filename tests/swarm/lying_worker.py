"""A contributor that lies, as a process: `python lying_worker.py KIND URL FOLDER ENV`. For tests of a whole run."""

import asyncio
import sys
from pathlib import Path

import msgspec

from headway.core.episodes import Episode, Node
from headway.launch.contribute.contributor import Contributor
from headway.launch.contribute.options import ContributeOptions
from headway.swarm.messages.orders import WorkOrder


class Liar(Contributor):
    """Samples like everyone else, and changes what it sends."""

    kind = ""

    async def _play(self, order: WorkOrder) -> list[Episode]:
        if self.kind == "temperature":
            sampling = msgspec.structs.replace(order.sampling, temperature=0.5)
            colder = msgspec.structs.replace(order, sampling=sampling)
            episodes = await super()._play(colder)
            for index, episode in enumerate(episodes):
                request = order.request(index)
                episode.id, episode.group_id = request.episode_id, request.group_id
                for node in sampled(episode):
                    node.temperature = order.sampling.temperature
            return episodes
        episodes = await super()._play(order)
        for episode in episodes:
            LIES[self.kind](episode)
        return episodes


def sampled(episode: Episode) -> list[Node]:
    return [node for node in episode.traces[0].nodes if node.sampled]


def edit_rewards(episode: Episode) -> None:
    trace = episode.traces[0]
    trace.rewards = {name: 1.0 - value for name, value in trace.rewards.items()}
    trace.reward = 1.0 - trace.reward


def edit_logprobs(episode: Episode) -> None:
    for node in sampled(episode):
        node.logprobs = [value - 0.5 for value in node.logprobs or []]


def edit_tokens(episode: Episode) -> None:
    for node in sampled(episode):
        node.token_ids[0] = (node.token_ids[0] + 1) % 60


LIES = {"rewards": edit_rewards, "logprobs": edit_logprobs, "tokens": edit_tokens}


def main(kind: str, url: str, folder: str, env: str) -> None:
    liar = Liar(ContributeOptions(url, Path(folder), env=env, threads=1), lambda line: print(line, flush=True))
    liar.kind = kind
    asyncio.run(liar.run())


if __name__ == "__main__":
    main(*sys.argv[1:])
