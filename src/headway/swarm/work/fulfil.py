"""A worker's side of an order: play its episodes."""

from collections.abc import Callable

from headway.core.episodes import EpisodeRequest
from headway.swarm.messages.orders import Contribution, Precision, WorkOrder
from headway.swarm.trust.play import Answer, Player


async def fulfil(
    order: WorkOrder, player: Player, answer_for: Callable[[EpisodeRequest], Answer], precision: Precision
) -> Contribution:
    """Play all episodes of an order. `answer_for` makes the function that samples the replies of one."""
    episodes = []
    for index in range(len(order.seeds)):
        request = order.request(index)
        episodes.append(await player.play(request, answer_for(request)))
    return Contribution(order.id, precision, episodes)
