"""Workers of a swarm in this process: honest ones, and liars of every kind that the benchmark knows."""

import asyncio
import copy
import random
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import msgspec
import numpy as np
import torch

from headway.core.activations import Places, TopStates
from headway.core.episodes import Episode, EpisodeRequest
from headway.core.protocol import GenerateRequest, SamplingParams
from headway.envs.tree import Prompt, Reply
from headway.inference.embedded.engine import EmbeddedEngine
from headway.inference.embedded.scheduling.scheduler import EngineLimits
from headway.inference.embedded.states import top_states
from headway.inference.outputs import Result
from headway.models.build import build_model
from headway.models.checkpoints.folders import read_tensors
from headway.models.checkpoints.tensors import load_hf_tensors
from headway.models.decoder import DecoderLM
from headway.models.registry import load_config
from headway.swarm.messages.orders import Contribution, Precision, WorkOrder
from headway.swarm.messages.proofs import count_proven, decode_proof, encode_proof
from headway.swarm.trust.play import Answer, Player
from headway.swarm.trust.rescore import rescore
from headway.swarm.work.fulfil import fulfil
from headway.swarm.work.prove import prove

MOST_NEIGHBOURS = 6


class LocalEngine:
    """An embedded engine that samples all replies to an order's prompt together, among a random number of other
    requests: batches of other sizes round otherwise. For environments of one turn."""

    def __init__(self, model: DecoderLM, stops: Iterable[int], context: int, chance: random.Random) -> None:
        limits = EngineLimits(
            max_running=16, max_batched_tokens=512, max_model_len=context, num_blocks=512, block_size=16
        )
        self._engine, self._stops, self._chance = EmbeddedEngine(model, limits), tuple(stops), chance
        self._count = 0

    def answers(self, requests: Sequence[EpisodeRequest]) -> Callable[[EpisodeRequest], Answer]:
        """Return what `fulfil` wants for an order with these requests."""
        replies: dict[str, Reply] = {}

        def answer_for(request: EpisodeRequest) -> Answer:
            def answer(prompt: Prompt) -> Reply:
                if not replies:
                    replies.update(self._sample(list(prompt.token_ids), requests))
                return replies.pop(request.episode_id)

            return answer

        return answer_for

    def prove(self, episodes: Sequence[Episode]) -> list[bytes]:
        """Compute the proofs of episodes' activations."""

        async def states_of(places: Sequence[Places], count: int) -> list[TopStates]:
            return top_states(self._engine, places, count)

        return asyncio.run(prove(episodes, states_of, self._engine.model.config.width))

    def _sample(self, tokens: list[int], requests: Sequence[EpisodeRequest]) -> dict[str, Reply]:
        for _ in range(self._chance.randrange(MOST_NEIGHBOURS)):
            length = self._chance.randint(1, len(tokens))
            self._add(tokens[:length], SamplingParams(max_tokens=self._chance.randint(1, 24)))
        self._engine.version = requests[0].version
        own = {self._add(tokens, stopping(request.sampling, self._stops)): request for request in requests}
        replies = {}
        while not self._engine.idle:
            for active, event in self._engine.step():
                if isinstance(event, Result) and (request := own.get(active.request_id)) is not None:
                    (choice,) = event.choices
                    replies[request.episode_id] = Reply(
                        choice.token_ids,
                        choice.logprobs,
                        choice.versions,
                        choice.finish_reason,
                        request.sampling.temperature,
                    )
        return replies

    def _add(self, tokens: list[int], params: SamplingParams) -> str:
        self._count += 1
        self._engine.add(GenerateRequest(tokens, sampling_params=params), str(self._count))
        return str(self._count)


def stopping(sampling: SamplingParams, stops: tuple[int, ...]) -> SamplingParams:
    return msgspec.structs.replace(sampling, stop_token_ids=stops)


def of_precision(model: DecoderLM, precision: Precision) -> DecoderLM:
    return copy.deepcopy(model).to(getattr(torch, precision))


@torch.no_grad()
def quantized(model: DecoderLM, bits: int = 8) -> DecoderLM:
    """Round every matrix to integers, with a scale for each row: what `int8` serving does."""
    other, most = copy.deepcopy(model), 2 ** (bits - 1) - 1
    for weight in other.parameters():
        if weight.dim() == 2:
            scale = weight.abs().amax(1, keepdim=True) / most
            weight.copy_((weight / scale).round() * scale)
    return other


@torch.no_grad()
def stepped(model: DecoderLM, lr: float, seed: int) -> DecoderLM:
    """The model one step of Adam away, in a random direction: every weight moves by the learning rate."""
    other, generator = copy.deepcopy(model), torch.Generator().manual_seed(seed)
    for weight in other.parameters():
        weight += lr * torch.randn(weight.shape, generator=generator).sign()
    return other


@dataclass
class Worker:
    """Fulfils orders with `models`: by the precision, those of the version that was ordered, and those of liars."""

    player: Player
    models: dict[str, DecoderLM]
    stops: tuple[int, ...]
    context: int
    precision: Precision
    chance: random.Random
    engines: dict[str, LocalEngine] = field(default_factory=dict)
    sampling_seconds: float = 0.0
    """Of this process on the CPU, for all contributions so far; vLLM has processes of its own."""
    proving_seconds: float = 0.0

    def honest(self, order: WorkOrder) -> Contribution:
        return self._fulfil(order, "")

    def lie(self, kind: str, order: WorkOrder, another: WorkOrder) -> Contribution:
        """Fulfil an order dishonestly. `another` is an order for the same task with other seeds."""
        return LIES[kind](self, order, another)

    def engine(self, model: str) -> LocalEngine:
        if model not in self.engines:
            self.engines[model] = LocalEngine(self.models[model], self.stops, self.context, self.chance)
        return self.engines[model]

    def _fulfil(self, order: WorkOrder, model: str, change: "Change | None" = None) -> Contribution:
        requests = [order.request(index) for index in range(len(order.seeds))]
        answers = self.engine(model).answers([change(request) for request in requests] if change else requests)
        began = time.process_time()
        contribution = asyncio.run(fulfil(order, self.player, answers, self.precision))
        sampled = time.process_time()
        contribution.proofs = self.engine(model).prove(contribution.episodes)
        self.sampling_seconds += sampled - began
        self.proving_seconds += time.process_time() - sampled
        return contribution

    def other_weights(self, order: WorkOrder, another: WorkOrder) -> Contribution:
        return self._fulfil(order, "other")

    def older_version(self, order: WorkOrder, another: WorkOrder) -> Contribution:
        return self._fulfil(order, "older")

    def quantized_weights(self, order: WorkOrder, another: WorkOrder) -> Contribution:
        return self._fulfil(order, "quantized")

    def other_temperature(self, order: WorkOrder, another: WorkOrder) -> Contribution:
        """Sample colder, and claim the logprobs that the right temperature gives these tokens."""
        return self.with_right_numbers(order, self._fulfil(order, "", _colder))

    def edited_tokens(self, order: WorkOrder, another: WorkOrder) -> Contribution:
        """Replace one token of each reply, and claim the logprobs of the new reply."""
        contribution = self._fulfil(order, "")
        replies = {episode.id: self._edited(episode) for episode in contribution.episodes}

        def answer_for(request: EpisodeRequest) -> Answer:
            return lambda prompt: replies[request.episode_id]

        return self.with_right_numbers(order, asyncio.run(fulfil(order, self.player, answer_for, self.precision)))

    def _edited(self, episode: Episode) -> Reply:
        (node,) = [node for node in episode.traces[0].nodes if node.sampled]
        at, tokens = self.chance.randrange(max(1, len(node.token_ids) - 1)), list(node.token_ids)
        vocab_size = self.models[""].config.vocab_size
        while tokens[at] == node.token_ids[at] or tokens[at] in self.stops:
            tokens[at] = self.chance.randrange(vocab_size)
        reason = "stop" if tokens[-1] in self.stops else "length"
        return Reply(tokens, node.logprobs or [], node.versions, reason, node.temperature)

    def edited_logprobs(self, order: WorkOrder, another: WorkOrder) -> Contribution:
        """Lower the logprobs of one token in twenty, which makes their gradients larger."""
        contribution = self._fulfil(order, "")
        for node in _sampled(contribution):
            assert node.logprobs is not None
            count = max(1, len(node.logprobs) // 20)
            for at in self.chance.sample(range(len(node.logprobs)), count):
                node.logprobs[at] -= 0.5
        return contribution

    def replayed(self, order: WorkOrder, another: WorkOrder) -> Contribution:
        """Send the rollouts of an earlier order for the same task once more."""
        earlier = self._fulfil(another, "")
        for index, episode in enumerate(earlier.episodes):
            _readdress(episode, order, index)
        return Contribution(order.id, self.precision, earlier.episodes, earlier.proofs)

    def invented_rewards(self, order: WorkOrder, another: WorkOrder) -> Contribution:
        contribution = self._fulfil(order, "")
        for episode in contribution.episodes:
            trace = episode.traces[0]
            trace.rewards = dict.fromkeys(trace.rewards, 1.0)
            trace.reward = 1.0
        return contribution

    def greedy(self, order: WorkOrder, another: WorkOrder) -> Contribution:
        """Decode greedily, and claim the logprobs of honest sampling."""
        return self.with_right_numbers(order, self._fulfil(order, "", _greedy))

    def best_of_two(self, order: WorkOrder, another: WorkOrder) -> Contribution:
        """Sample each episode a second time, with a seed of its own, and keep the better one."""
        first, second = self._fulfil(order, ""), self._fulfil(another, "")
        for index, episode in enumerate(second.episodes):
            _readdress(episode, order, index)
        tries = [zip(each.episodes, each.proofs, strict=True) for each in (first, second)]
        kept = [better if better[0].reward >= own[0].reward else own for own, better in zip(*tries, strict=True)]
        first.episodes, first.proofs = [episode for episode, _ in kept], [proof for _, proof in kept]
        return first

    def other_proof(self, order: WorkOrder, another: WorkOrder) -> Contribution:
        """Work honestly, and send a proof of other weights."""
        contribution = self._fulfil(order, "")
        contribution.proofs = self.engine("other").prove(contribution.episodes)
        return contribution

    def replayed_proof(self, order: WorkOrder, another: WorkOrder) -> Contribution:
        """Work honestly, and send the proofs of an earlier order for the same task once more."""
        contribution, earlier = self._fulfil(order, ""), b"".join(self._fulfil(another, "").proofs)
        contribution.proofs = [(earlier * len(proof))[: len(proof)] for proof in contribution.proofs]
        return contribution

    def random_proof(self, order: WorkOrder, another: WorkOrder) -> Contribution:
        """Work honestly, and send numbers of the right size, at random."""
        contribution, width = self._fulfil(order, ""), self.models[""].config.width
        for at, episode in enumerate(contribution.episodes):
            states = count_proven(episode.traces[0])
            sizes = np.abs(decode_proof(contribution.proofs[at], states, width).values_PK)
            signs = [[self.chance.choice((-1, 1)) for _ in row] for row in sizes]
            indices = [self.chance.sample(range(width), len(row)) for row in sizes]
            contribution.proofs[at] = encode_proof(TopStates.of(indices, (sizes * signs).tolist()))
        return contribution

    def with_right_numbers(self, order: WorkOrder, contribution: Contribution) -> Contribution:
        """Claim the logprobs and prove the states that the right weights give these tokens."""
        contribution.proofs = self.engine("").prove(contribution.episodes)
        return self.with_right_logprobs(order, contribution)

    def with_right_logprobs(self, order: WorkOrder, contribution: Contribution) -> Contribution:
        for seed, episode in zip(order.seeds, contribution.episodes, strict=True):
            trace = episode.traces[0]
            logprobs = rescore(self.models[""], trace, seed, order.sampling.temperature).logprobs
            for node in trace.nodes:
                if node.sampled:
                    own, logprobs = np.split(logprobs, [len(node.token_ids)])
                    node.logprobs = own.astype(np.float32).tolist()
                    node.temperature = order.sampling.temperature
        return contribution


Change = Callable[[EpisodeRequest], EpisodeRequest]
Lie = Callable[[Worker, WorkOrder, WorkOrder], Contribution]
LIES: dict[str, Lie] = {
    "other_weights": Worker.other_weights,
    "older_version": Worker.older_version,
    "quantized_weights": Worker.quantized_weights,
    "other_temperature": Worker.other_temperature,
    "edited_tokens": Worker.edited_tokens,
    "edited_logprobs": Worker.edited_logprobs,
    "replayed": Worker.replayed,
    "invented_rewards": Worker.invented_rewards,
    "greedy": Worker.greedy,
    "best_of_two": Worker.best_of_two,
    "other_proof": Worker.other_proof,
    "replayed_proof": Worker.replayed_proof,
    "random_proof": Worker.random_proof,
}


def _colder(request: EpisodeRequest) -> EpisodeRequest:
    return _sampled_with(request, temperature=0.7 * request.sampling.temperature)


def _greedy(request: EpisodeRequest) -> EpisodeRequest:
    return _sampled_with(request, temperature=0.0)


def _sampled_with(request: EpisodeRequest, temperature: float) -> EpisodeRequest:
    sampling = msgspec.structs.replace(request.sampling, temperature=temperature)
    return msgspec.structs.replace(request, sampling=sampling)


def _readdress(episode: Episode, order: WorkOrder, index: int) -> None:
    request = order.request(index)
    episode.id, episode.group_id, episode.version = request.episode_id, request.group_id, request.version


def _sampled(contribution: Contribution) -> list:  # type: ignore[type-arg]  # nodes
    return [node for episode in contribution.episodes for node in episode.traces[0].nodes if node.sampled]


def load_trusted(folder: Path, scale: float = 1.0) -> DecoderLM:
    """Load a checkpoint in float32, its matrices scaled."""
    model = build_model(load_config(folder), seed=None)
    load_hf_tensors(model, read_tensors(folder))
    with torch.no_grad():
        for weight in model.parameters():
            if weight.dim() > 1:
                weight.mul_(scale)
    return model.eval()
