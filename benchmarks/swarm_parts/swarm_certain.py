"""A model that is nearly certain of every token: it was trained to answer every prompt with one word."""

import asyncio

import torch
import torch.nn.functional as F

from headway.core.episodes import EpisodeRequest
from headway.envs.tree import Prompt, Reply
from headway.models.attention import PackedPlan
from headway.models.decoder import DecoderLM
from headway.models.packed import PackedTokens
from headway.swarm.messages.orders import RunTerms
from headway.swarm.trust.play import Answer, Player
from headway.swarm.work.fulfil import fulfil

WORD = b"swarm and swarm"
STEPS, PROMPTS, LEARNING_RATE = 60, 8, 2e-3
SHARPER = 4.0
"""The final norm is scaled by this, and all logits with it, so that what is likely becomes certain."""


def make_certain(model: DecoderLM, player: Player, terms: RunTerms, stop: int) -> DecoderLM:
    """Train a model of bytes, in place, to answer the prompts of orders with `WORD` and the token `stop`."""
    reply = [*WORD, stop]
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE)
    for step in range(STEPS):
        prompts = [prompt_of(player, terms, number) for number in range(step * PROMPTS, (step + 1) * PROMPTS)]
        sequences = [[*prompt, *reply] for prompt in prompts]
        ids_T = torch.tensor([token for sequence in sequences for token in sequence])
        ends = torch.tensor([len(sequence) for sequence in sequences]).cumsum(0)
        at_N = torch.cat([torch.arange(int(end) - len(reply), int(end)) for end in ends])
        plan = PackedPlan([len(sequence) for sequence in sequences])
        hidden_TD = model(PackedTokens(ids_T, plan.positions, plan)).hidden_TD
        loss = F.cross_entropy(model.logits(hidden_TD[at_N - 1]), ids_T[at_N])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    with torch.no_grad():
        model.model.norm.weight.mul_(SHARPER)
    return model.eval()


def prompt_of(player: Player, terms: RunTerms, number: int) -> list[int]:
    """Return the prompt of an order."""
    prompts: list[list[int]] = []

    def answer_for(request: EpisodeRequest) -> Answer:
        def answer(prompt: Prompt) -> Reply:
            prompts.append(list(prompt.token_ids))
            return Reply([0], [0.0], [(1, 1)], "length", 1.0)

        return answer

    asyncio.run(fulfil(terms.order(b"t" * 32, 1, "weights", number), player, answer_for, "float32"))
    return prompts[0]
