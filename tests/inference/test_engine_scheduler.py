"""The scheduler alone, driven by a simulated model."""

from dataclasses import dataclass

from hypothesis import given, settings
from hypothesis import strategies as st

from headway.core.protocol import SamplingParams
from headway.inference.embedded.scheduling.blocks import BlockCache, root_hash
from headway.inference.embedded.scheduling.scheduler import EngineLimits, Scheduler, Step
from headway.inference.embedded.scheduling.sequence import Sequence


@dataclass
class Simulation:
    """Runs steps as the engine would: what was scheduled is computed, what is complete gets a token."""

    scheduler: Scheduler
    arrivals: int = 0
    started: list[str] | None = None

    def add(self, prompt: list[int], output: int, priority: int = 0, salt: str = "") -> Sequence:
        self.arrivals += 1
        sequence = Sequence(
            request_id=f"r{self.arrivals}",
            index=0,
            order=(priority, self.arrivals, 0),
            tokens=list(prompt),
            prompt_len=len(prompt),
            params=SamplingParams(),
            seed=0,
            limit=len(prompt) + output,
            stops=frozenset(),
            salt=salt,
        )
        self.scheduler.add(sequence)
        return sequence

    def step(self) -> Step:
        step = self.scheduler.schedule()
        for sequence, count in zip(step.sequences, step.counts, strict=True):
            assert 0 < count <= sequence.pending
            assert len(sequence.blocks) * self.scheduler.cache.block_size >= sequence.computed + count
            sequence.computed += count
            if sequence.pending == 0:
                sequence.extend([7], [0.0], 0)
            if sequence.finish_reason:
                self.scheduler.remove(sequence)
        return step


def simulate(blocks: int = 64, size: int = 4, running: int = 8, tokens: int = 32) -> Simulation:
    cache = BlockCache(blocks, size)
    limits = EngineLimits(running, tokens, max_model_len=blocks * size, num_blocks=blocks, block_size=size)
    return Simulation(Scheduler(cache, limits, lambda s: root_hash(s.salt)))


Requests = st.lists(
    st.tuples(st.integers(1, 30), st.integers(1, 30), st.integers(-1, 1), st.sampled_from("ab")),
    min_size=1,
    max_size=20,
)


@settings(max_examples=60, deadline=None)
@given(Requests, st.integers(15, 40), st.integers(1, 6), st.integers(6, 40))
def test_everything_finishes_within_the_limits_and_all_blocks_come_back(
    requests: list[tuple[int, int, int, str]], blocks: int, running: int, tokens: int
) -> None:
    sim = simulate(blocks, 4, running, tokens)
    sequences = [sim.add([length % 5] * length, output, priority, salt) for length, output, priority, salt in requests]
    for _ in range(20_000):
        step = sim.step()
        assert sum(step.counts) <= tokens
        assert len(sim.scheduler.running) <= running
        assert len({id(s) for s in step.sequences}) == len(step.sequences)
        if not sim.scheduler.running and not sim.scheduler.waiting:
            break
    for sequence, (length, output, _, _) in zip(sequences, requests, strict=True):
        assert sequence.finish_reason == "length"
        assert len(sequence) == length + output
    assert sim.scheduler.cache.free_blocks == blocks


def test_equals_start_in_the_order_they_came_and_the_urgent_first() -> None:
    sim = simulate(running=1)
    late = [sim.add([1] * 4, 2) for _ in range(3)]
    urgent = sim.add([1] * 4, 2, priority=-1)
    finished = []
    while sim.scheduler.waiting or sim.scheduler.running:
        finished += [s for s in sim.step().sequences if s.finish_reason]
    assert finished == [urgent, *late]


def test_a_long_prompt_is_cut_into_chunks_while_others_decode() -> None:
    sim = simulate(running=4, tokens=8)
    short = sim.add([1, 2, 3], 20)
    sim.step()
    long = sim.add([5] * 30, 5)
    counts = []
    while long.output_len == 0:
        step = sim.step()
        assert short in step.sequences, "a decoding sequence must be in every step"
        counts.append(dict(zip(map(id, step.sequences), step.counts, strict=True))[id(long)])
    assert counts == [7, 7, 7, 7, 2]


def test_nobody_overtakes_a_prompt_that_waits_for_room() -> None:
    sim = simulate(blocks=10, size=4, running=8, tokens=64)
    first = sim.add([1] * 20, 8)
    sim.step()
    big = sim.add([2] * 32, 2)
    small = sim.add([3] * 2, 2)
    while not first.finish_reason:
        step = sim.step()
        assert small not in step.sequences
    started = sim.step().sequences
    assert big in started


def test_the_last_in_line_gives_way_and_resumes_with_its_tokens() -> None:
    sim = simulate(blocks=6, size=4, running=4, tokens=64)
    early = sim.add([1] * 8, 12, salt="a")
    late = sim.add([2] * 8, 12, salt="b")
    while not sim.scheduler.preemptions:
        sim.step()
    assert late.preemptions == 1 and early.preemptions == 0
    kept = list(late.tokens)
    while sim.scheduler.waiting or sim.scheduler.running:
        sim.step()
    assert late.tokens[: len(kept)] == kept and len(late) == 20 and len(early) == 20


def test_a_group_shares_its_prompt_within_the_step_that_computes_it() -> None:
    sim = simulate(tokens=64)
    group = [sim.add(list(range(10)), 4) for _ in range(4)]
    step = sim.step()
    assert step.counts == [10, 2, 2, 2]
    assert all(s.blocks[:2] == group[0].blocks[:2] for s in group)
    assert len({s.blocks[2] for s in group}) == 4


def test_aborted_sequences_return_their_blocks_wherever_they_are() -> None:
    sim = simulate(blocks=20, running=1)
    running, waiting = sim.add([1] * 9, 5), sim.add([2] * 9, 5)
    sim.step()
    sim.scheduler.remove(running)
    sim.scheduler.remove(waiting)
    assert sim.scheduler.cache.free_blocks == 20
    assert not sim.scheduler.running and not sim.scheduler.waiting


def test_while_held_only_what_had_started_goes_on() -> None:
    sim = simulate(blocks=6, size=4, running=4, tokens=64)
    started = [sim.add([n] * 8, 12, salt=str(n)) for n in range(2)]
    sim.step()
    sim.scheduler.hold = True
    new = sim.add([9] * 2, 2)
    while any(not s.finish_reason for s in started):
        assert new not in sim.step().sequences
    assert sim.scheduler.preemptions > 0, "the scenario must include one that was preempted"
    sim.scheduler.hold = False
    assert new in sim.step().sequences
