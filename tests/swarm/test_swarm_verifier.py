"""Verification with a real engine and model: honest work passes, lies do not, and the desk keeps the books."""

import asyncio
import copy
import random
from collections.abc import Iterator
from pathlib import Path

import msgspec
import numpy as np
import pytest
import torch
from swarm_run import CONTEXT, Swarm, make_swarm
from swarm_workers import Worker, quantized, stepped

from headway.base.errors import HeadwayError, UsageError
from headway.core.episodes import EpisodeError
from headway.envs.bundled.reverse_text import ReverseText
from headway.models.decoder import DecoderLM
from headway.models.tiny import resolve_model
from headway.rendering.load import load_renderer
from headway.swarm.messages.api import WorkRequest
from headway.swarm.messages.canonical import InvalidMessageError, encode
from headway.swarm.messages.keys import SigningKey, open_signed
from headway.swarm.messages.limits import Limits, TooManyRequestsError
from headway.swarm.messages.orders import Contribution, WorkOrder
from headway.swarm.messages.verdict import Verdict
from headway.swarm.trust.audit import audit_ledger
from headway.swarm.trust.checks.base import Evidence
from headway.swarm.trust.checks.form import Form
from headway.swarm.trust.checks.numbers import Logprobs, Ranks, SeededDraws
from headway.swarm.trust.checks.termination import Termination
from headway.swarm.trust.ledger import Ledger
from headway.swarm.trust.play import Player
from headway.swarm.trust.queue import RescoringQueue, seeded_traces
from headway.swarm.trust.rescore import rescore, rescore_all
from headway.swarm.trust.rescored import Rescored
from headway.swarm.trust.standing import LEAST_SHARE, Standing
from headway.swarm.trust.verifier import Verifier
from headway.swarm.work.desk import Desk, Taken

RUN = SigningKey(b"r" * 32)
WORKER, OTHER = SigningKey(b"w" * 32), SigningKey(b"o" * 32)


@pytest.fixture(scope="module")
def swarm() -> Iterator[Swarm]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield make_swarm()
    torch.set_num_threads(threads)


def verifier(swarm: Swarm) -> Verifier:
    light = (Form(swarm.vocab_size, swarm.width), Termination(swarm.stops))
    return Verifier(light, swarm.player, lambda version, precision: swarm.models[precision])


def verify(swarm: Swarm, order: WorkOrder, sent: Contribution, *, spot: int | None = None) -> Verdict:
    # What is judged has gone over a wire.
    sent = msgspec.msgpack.decode(encode(sent), type=Contribution)
    return asyncio.run(verifier(swarm).verify(order, sent, spot=spot))[0]


@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
def test_honest_work_is_accepted(swarm: Swarm, precision: str) -> None:
    order = swarm.order()
    sent = swarm.workers[precision].honest(order)
    verdict, episodes = asyncio.run(verifier(swarm).verify(order, sent, spot=None))
    assert verdict.accepted, verdict
    assert verdict.rescored and verdict.tokens > 8
    for episode, claimed in zip(episodes, sent.episodes, strict=True):
        assert episode.traces[0].nodes == claimed.traces[0].nodes and episode.reward == claimed.reward
        assert episode.id == claimed.id and episode.error is None


@pytest.mark.parametrize(
    ("kind", "check"),
    [
        ("other_weights", "logprobs"),
        ("older_version", "logprobs"),
        ("quantized_weights", "logprobs"),
        ("other_temperature", "draws"),
        ("edited_tokens", "draws"),
        ("edited_logprobs", "logprobs"),
        ("replayed", "draws"),
        ("invented_rewards", "rewards"),
        ("greedy", "draws"),
        ("other_proof", "activations"),
        ("replayed_proof", "activations"),
        ("random_proof", "activations"),
    ],
)
def test_each_lie_is_refused_by_the_check_for_it(swarm: Swarm, kind: str, check: str) -> None:
    order = swarm.order(1)
    another = msgspec.structs.replace(order, seeds=tuple(seed + 1000 for seed in order.seeds))
    verdict = verify(swarm, order, swarm.workers["float32"].lie(kind, order, another))
    assert (verdict.accepted, verdict.check) == (False, check), verdict


def sure_of(model: DecoderLM, token: int) -> DecoderLM:
    """Make a model nearly certain of one token, whatever it read: all its states point the same way, and so does the
    token's row of the head."""
    model = copy.deepcopy(model)
    direction = torch.randn(model.config.width, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        model.head_weight().add_(direction)
        model.head_weight()[token] += 8 * direction
    return model


@pytest.mark.parametrize("lie", ["other_weights", "older_version", "quantized_weights"])
def test_of_a_model_that_is_certain_the_proof_alone_shows_the_weights(swarm: Swarm, lie: str) -> None:
    model = sure_of(swarm.models["float32"], ord("a"))
    changed = {"other": stepped(model, 5e-3, 1), "older": stepped(model, 1e-4, 2), "quantized": quantized(model)}
    worker = Worker(swarm.player, {"": model, **changed}, swarm.stops, CONTEXT, "float32", random.Random(0))
    order = swarm.order(6)
    honest, lying = worker.honest(order), worker.lie(lie, order, order)
    light = (Form(swarm.vocab_size, swarm.width), Termination(swarm.stops))
    without = Verifier(light, swarm.player, lambda *_: model, (Logprobs(), SeededDraws(), Ranks()))
    with_proof = Verifier(light, swarm.player, lambda *_: model)
    found = [
        asyncio.run(verifier.verify(order, sent, spot=None))[0].check
        for verifier in (without, with_proof)
        for sent in (honest, lying)
    ]
    assert found == ["", "", "", "activations"]


def test_rewards_are_computed_again_also_where_tokens_are_not(swarm: Swarm) -> None:
    order = swarm.order(2)
    sent = swarm.workers["float32"].honest(order)
    assert verify(swarm, order, sent, spot=0) == Verdict(True, tokens=verify(swarm, order, sent).tokens)
    sent.episodes[2].traces[0].reward += 0.5
    assert verify(swarm, order, sent, spot=0).check == "rewards"
    sent.episodes[1].traces[0].nodes[-1].finish_reason = "x" * 100_000
    refused = verify(swarm, order, sent, spot=0)
    assert refused.check == "termination" and len(refused.reason) <= 300
    sent = swarm.workers["float32"].honest(order)
    prompt = sent.episodes[0].traces[0].nodes[0]
    prompt.token_ids = [prompt.token_ids[0] ^ 1, *prompt.token_ids[1:]]  # another prompt than the environment's
    assert verify(swarm, order, sent, spot=0).check == "rewards"


@pytest.mark.parametrize("lie", ["older_version", "quantized_weights", "other_temperature", "replayed"])
def test_any_one_episode_shows_a_lie_about_all_of_them(swarm: Swarm, lie: str) -> None:
    order = swarm.order(1)
    another = msgspec.structs.replace(order, seeds=tuple(seed + 1000 for seed in order.seeds))
    sent = swarm.workers["float32"].lie(lie, order, another)
    whole = verify(swarm, order, sent)
    assert not whole.accepted
    assert [verify(swarm, order, sent, spot=spot) for spot in range(len(order.seeds))] == [whole] * len(order.seeds)


def test_a_lie_about_one_episode_is_seen_in_that_one(swarm: Swarm) -> None:
    order = swarm.order(2)
    sent, older = swarm.workers["float32"].honest(order), swarm.workers["float32"].lie("older_version", order, order)
    sent.episodes[3], sent.proofs[3] = older.episodes[3], older.proofs[3]
    found = [verify(swarm, order, sent, spot=spot).accepted for spot in range(4)]
    assert found == [True, True, True, False]


def test_one_episode_alone_refuses_nobody(swarm: Swarm) -> None:
    """Bounds hold for whole contributions: what looks wrong in one short reply is looked at among all."""

    class Wary(Logprobs):
        def refuse(self, evidence: Evidence) -> str | None:
            return "too short to tell" if len(evidence.contribution.episodes) == 1 else super().refuse(evidence)

    light = (Form(swarm.vocab_size, swarm.width), Termination(swarm.stops))
    wary = Verifier(light, swarm.player, lambda *_: swarm.models["float32"], (Wary(),))
    order = swarm.order(2)
    verdict, episodes = asyncio.run(wary.verify(order, swarm.workers["float32"].honest(order), spot=1))
    assert verdict.accepted and verdict.rescored and len(episodes) == len(order.seeds)


def test_only_tokens_and_logprobs_of_a_stranger_are_trained_on(swarm: Swarm) -> None:
    order = swarm.order(3)
    sent = swarm.workers["float32"].honest(order)
    trace = sent.episodes[0].traces[0]
    trace.notes["to"], trace.metrics["made_up"], sent.episodes[0].timings = "the reader", 1.0, {"total": 0.0}
    verdict, episodes = asyncio.run(verifier(swarm).verify(order, sent, spot=0))
    assert verdict.accepted and not episodes[0].traces[0].notes and "made_up" not in episodes[0].traces[0].metrics


def test_rescoring_is_the_model_applied_to_each_prefix(swarm: Swarm) -> None:
    order = swarm.order(4)
    sent = swarm.workers["float32"].honest(order)
    again = rescore_all(swarm.models["float32"], seeded_traces(order, sent), order.sampling.temperature)
    claimed = [value for e in sent.episodes for node in e.traces[0].nodes for value in node.logprobs or ()]
    assert np.allclose(again.claimed, claimed) and np.allclose(again.logprobs, claimed, atol=1e-4)
    assert np.allclose(np.log(again.high - again.low), again.logprobs) and not again.missed.any()
    # At another temperature the same tokens have other logprobs.
    trace = sent.episodes[0].traces[0]
    hotter = rescore(swarm.models["float32"], trace, order.seeds[0], 2.0).logprobs
    assert not np.allclose(hotter, again.logprobs[: len(hotter)], atol=1e-2)


def test_contributions_that_wait_share_a_pass_and_get_their_own_numbers(swarm: Swarm) -> None:
    """The first is computed alone; those that come meanwhile follow together, each kind of model by itself."""
    passes: list[tuple[int, str]] = []

    def model_of(version: int, precision: str) -> DecoderLM:
        passes.append((version, precision))
        if version == 7:
            raise HeadwayError("it is gone")
        return swarm.models[precision]

    orders = [swarm.order(number) for number in range(5)]
    sent = [swarm.workers["float32"].honest(order) for order in orders]
    gone = msgspec.structs.replace(orders[0], version=7)

    async def rescore_together() -> list[Rescored | BaseException]:
        queue = RescoringQueue(model_of)
        first = asyncio.create_task(queue.rescore(orders[0], sent[0]))
        while not passes:  # noqa: ASYNC110 - the first is in a thread of its own
            await asyncio.sleep(0)
        later = [queue.rescore(*pair) for pair in zip((*orders[1:], gone), (*sent[1:], sent[0]), strict=True)]
        return await asyncio.gather(first, *later, return_exceptions=True)

    *found, failed = asyncio.run(rescore_together())
    assert passes == [(1, "float32"), (1, "float32"), (7, "float32")] and isinstance(failed, HeadwayError)
    for order, contribution, again in zip(orders, sent, found, strict=True):
        alone = rescore_all(swarm.models["float32"], seeded_traces(order, contribution), order.sampling.temperature)
        assert isinstance(again, Rescored) and np.array_equal(again.claimed, alone.claimed)
        assert np.allclose(again.logprobs, alone.logprobs, atol=1e-5)
        assert np.allclose(again.states_PD, alone.states_PD, atol=1e-5)


def test_an_environment_that_does_not_repeat_itself_is_refused(swarm: Swarm) -> None:
    class Moody(ReverseText):
        resumable = False

    renderer = load_renderer(resolve_model("tiny"), "auto")
    with pytest.raises(UsageError, match="repeats itself"):
        Verifier((), Player(Moody(num_tasks=4), "moody", renderer), lambda *_: swarm.models["float32"])


def test_replies_that_the_environment_never_asked_for_are_found(swarm: Swarm) -> None:
    order = swarm.order(5)
    episode = swarm.workers["float32"].honest(order).episodes[0]
    nodes = episode.traces[0].nodes
    nodes.append(msgspec.structs.replace(nodes[-1], parent=len(nodes) - 1))
    again = asyncio.run(swarm.player.play_again(order.request(0), episode, order.context))
    assert isinstance(again.error, EpisodeError) and "fewer replies" in again.error.message
    nodes[-2:] = []
    again = asyncio.run(swarm.player.play_again(order.request(0), episode, order.context))
    assert isinstance(again.error, EpisodeError) and "more replies" in again.error.message


class Books:
    """A desk with a ledger, and a worker that answers what it is given."""

    def __init__(self, swarm: Swarm, path: Path, **limits: Limits) -> None:
        self.swarm, self.path = swarm, path
        self.desk = Desk(swarm.terms, RUN, Ledger(path, RUN), verifier(swarm), clock=lambda: 0.0, **limits)
        self.desk.publish(1, "weights")

    def ask(self, key: SigningKey = WORKER) -> WorkOrder | None:
        signed = self.desk.give(encode(key.sign(WorkRequest("a-run"))), "10.0.0.1")
        return None if signed is None else open_signed(WorkOrder, signed, RUN.public)

    def send(self, contribution: Contribution, key: SigningKey = WORKER) -> Taken:
        return asyncio.run(self.desk.take(encode(key.sign(contribution)), "10.0.0.1"))

    def honest(self, order: WorkOrder | None) -> Contribution:
        assert order is not None
        return self.swarm.workers["float32"].honest(order)


def test_the_desk_gives_orders_and_takes_each_answer_once(swarm: Swarm, tmp_path: Path) -> None:
    books = Books(swarm, tmp_path / "ledger.jsonl")
    first, second = books.ask(), books.ask()
    assert first is not None and second is not None and first.worker == WORKER.public and first.id != second.id
    sent = books.honest(first)
    assert books.send(sent, OTHER).verdict.check == "order"  # another's order
    taken = books.send(sent)
    assert taken.verdict.accepted and len(taken.episodes) == len(first.seeds)
    assert books.send(sent).verdict.check == "order"  # once
    # A desk that is killed goes on from its ledger.
    again = Books(swarm, tmp_path / "ledger.jsonl")
    assert again.send(sent).verdict.check == "order" and again.send(books.honest(second)).verdict.accepted
    third = again.ask()
    again.desk.retire(1)
    assert again.send(books.honest(third)).verdict.check == "order" and again.ask() is None
    report = audit_ledger(tmp_path / "ledger.jsonl", RUN.public)
    standing = report.trust.workers[WORKER.public.hex()]
    assert (report.problems, standing.accepted, standing.refused, standing.abandoned) == ([], 2, 0, 1)


def test_a_liar_is_cut_off(swarm: Swarm, tmp_path: Path) -> None:
    books = Books(swarm, tmp_path / "ledger.jsonl")
    for _ in range(2):
        order = books.ask(OTHER)
        assert order is not None
        lie = swarm.workers["float32"].lie("invented_rewards", order, order)
        assert books.send(lie, OTHER).verdict.check == "rewards"
    assert books.ask(OTHER) is None and books.ask(WORKER) is not None
    assert "cut off" in (tmp_path / "ledger.jsonl").read_text().replace("_", " ")


def test_a_worker_of_good_name_that_keeps_older_weights_is_refused_at_once(swarm: Swarm, tmp_path: Path) -> None:
    """It worked honestly as long as there was no newer version, and so hardly anything of it is rescored."""
    books = Books(swarm, tmp_path / "ledger.jsonl")
    books.desk.trust.workers[WORKER.public.hex()] = Standing(accepted=80, streak=80)
    books.desk.publish(2, "newer weights")
    while (order := books.ask()) is not None and swarm.terms.is_rescored(order.id, LEAST_SHARE):
        assert books.send(books.honest(order)).verdict.rescored
    assert order is not None and books.desk.trust.share(WORKER.public.hex()) == LEAST_SHARE
    honest = books.send(books.honest(order)).verdict
    assert honest.accepted and not honest.rescored
    while (order := books.ask()) is not None and swarm.terms.is_rescored(order.id, LEAST_SHARE):
        assert books.send(books.honest(order)).verdict.rescored
    assert order is not None
    taken = books.send(swarm.workers["float32"].lie("older_version", order, order))
    assert not taken.verdict.accepted and len(taken.dropped) == 1
    assert books.desk.trust.share(WORKER.public.hex()) == 1.0


def test_a_worker_with_many_open_orders_gets_the_oldest_again(swarm: Swarm, tmp_path: Path) -> None:
    books = Books(swarm, tmp_path / "ledger.jsonl")
    given = [books.ask() for _ in range(6)]
    assert given[4] == given[5] == given[0] and len({order.id for order in given if order}) == 4


def test_forged_messages_and_floods_leave_no_trace(swarm: Swarm, tmp_path: Path) -> None:
    books = Books(swarm, tmp_path / "ledger.jsonl", per_address=Limits(rate=1.0, burst=8.0, most=4))
    before = (tmp_path / "ledger.jsonl").read_bytes()
    signed = WORKER.sign(WorkRequest("a-run"))
    forged = [b"", b"\x93", encode(msgspec.structs.replace(signed, key=OTHER.public))]
    for data in [
        *forged,
        encode(WORKER.sign(WorkRequest("another"))),
        encode(RUN.sign(Contribution("x", "float32", []))),
    ]:
        with pytest.raises(InvalidMessageError):
            books.desk.give(data, "10.0.0.1")
    for data in forged:
        with pytest.raises(InvalidMessageError):
            asyncio.run(books.desk.take(data, "10.0.0.1"))
    with pytest.raises(TooManyRequestsError):
        books.desk.give(encode(signed), "10.0.0.1")
    assert (tmp_path / "ledger.jsonl").read_bytes() == before and not books.desk.trust.workers
