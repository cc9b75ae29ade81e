"""Random workloads: whatever is shared, chunked, preempted or aborted, the logprobs are the trainer's."""

import random

from engine_common import FAMILIES, make_engine, make_model, mismatch, prompt, request
from hypothesis import given, settings
from hypothesis import strategies as st

from headway.inference.outputs import Result

MODELS = {name: make_model(config) for name, config in FAMILIES.items()}


@settings(max_examples=8, deadline=None, derandomize=True)
@given(
    seed=st.integers(0, 10**6),
    family=st.sampled_from(sorted(FAMILIES)),
    block_size=st.sampled_from([1, 2, 4, 16]),
    max_running=st.integers(1, 12),
    budget=st.sampled_from([12, 40, 200]),
    blocks=st.integers(80, 300),
    depth=st.integers(0, 1),
)
def test_random_workloads(
    seed: int, family: str, block_size: int, max_running: int, budget: int, blocks: int, depth: int
) -> None:
    chance = random.Random(seed)
    model = MODELS[family]
    engine = make_engine(
        model,
        depth=depth,
        block_size=block_size,
        max_running=max_running,
        max_batched_tokens=budget,
        max_model_len=64,
        num_blocks=max(blocks // block_size, -(-64 // block_size)),
    )
    requests = {}
    results: dict[str, Result] = {}
    aborted = set()
    while len(requests) < 14 or not engine.idle:
        if len(requests) < 14 and chance.random() < 0.4:
            stem = prompt(20, seed=chance.randrange(3))[: chance.randrange(1, 20)]
            tokens = stem + prompt(chance.randrange(1, 20), seed=chance.randrange(5))
            fields = {"n": chance.choice([1, 1, 4]), "temperature": chance.choice([0.7, 1.0]), "seed": seed}
            name = str(len(requests))
            requests[name] = request(tokens, chance.randrange(1, 24), priority=chance.randrange(2), **fields)
            engine.add(requests[name], name)
        events = engine.step()
        if chance.random() < 0.03 and engine.active:
            name = chance.choice(sorted(engine.active))
            aborted.add(name)
            events = events + engine.abort(name)
        results |= {job.request_id: event for job, event in events if isinstance(event, Result)}
    assert engine.cache.free_blocks == engine.cache.num_blocks
    for name, result in results.items():
        own = requests[name]
        for choice in result.choices:
            assert name in aborted or len(choice.token_ids) == own.sampling_params.max_tokens
            if choice.token_ids:
                assert mismatch(model, own.token_ids, choice, own.sampling_params.temperature) < 1e-5
