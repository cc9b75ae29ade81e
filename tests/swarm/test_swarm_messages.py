"""Keys, signatures, the canonical encoding, and the orders that follow from a run's terms."""

import contextlib

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from headway.base.errors import UsageError
from headway.core.episodes import Task
from headway.core.protocol import SamplingParams
from headway.swarm.messages.canonical import InvalidMessageError, decode, encode
from headway.swarm.messages.keys import Signed, SigningKey, open_signed
from headway.swarm.messages.orders import RunTerms, check_sampling

TASKS = [Task(str(i), {"word": "abc", "n": i}) for i in range(50)]
KEY = SigningKey(b"k" * 32)


class Note(msgspec.Struct):
    text: str
    number: float = 0.0
    data: dict[str, int] = {}


class Other(msgspec.Struct):
    text: str
    number: float = 0.0
    data: dict[str, int] = {}


def terms(secret: bytes = b"s" * 32, run: str = "run") -> RunTerms:
    return RunTerms(run, secret, "env", TASKS, 4, SamplingParams(max_tokens=8), 64)


@given(st.dictionaries(st.text(), st.integers(-(2**40), 2**40)), st.floats(allow_nan=False), st.randoms())
def test_equal_messages_have_equal_bytes(data: dict[str, int], number: float, chance) -> None:
    items = list(data.items())
    chance.shuffle(items)
    note = Note("a", number, data)
    assert encode(Note("a", number, dict(items))) == encode(note)
    assert decode(Note, encode(note)) == note


def test_other_encodings_of_a_message_are_refused() -> None:
    assert decode(Note, msgspec.msgpack.encode({"text": "a", "number": 1.0, "data": {}})).number == 1
    for other in ({"number": 1.0, "text": "a", "data": {}}, {"text": "a", "number": 1, "data": {}}, {"text": "a"}):
        with pytest.raises(InvalidMessageError, match="canonical"):
            decode(Note, msgspec.msgpack.encode(other))


@given(st.binary(max_size=200))
def test_bytes_of_a_stranger_are_a_message_or_an_error(data: bytes) -> None:
    for kind in (Note, Signed):
        with contextlib.suppress(InvalidMessageError):
            assert encode(decode(kind, data)) == data


def test_deep_and_long_messages_are_refused() -> None:
    with pytest.raises(InvalidMessageError):
        decode(Task, b"\x82\xa2id\xa1a\xa4data\x81\xa1a" + b"\x91" * 100_000)
    with pytest.raises(InvalidMessageError, match="at most 10"):
        decode(Note, encode(Note("a" * 20)), longest=10)


@given(st.integers(0, 63), st.sampled_from(["body", "key", "signature"]))
def test_a_signature_holds_for_the_message_its_kind_and_its_key_alone(at: int, where: str) -> None:
    signed = KEY.sign(Note("hello", 2.0))
    assert open_signed(Note, signed, KEY.public) == Note("hello", 2.0)
    value = bytearray(getattr(signed, where))
    value[at % len(value)] ^= 1
    with pytest.raises(InvalidMessageError):
        open_signed(Note, msgspec.structs.replace(signed, **{where: bytes(value)}))


def test_a_signed_message_is_not_one_of_another_kind_or_author() -> None:
    signed = KEY.sign(Note("hello"))
    with pytest.raises(InvalidMessageError, match="signature"):
        open_signed(Other, signed)
    with pytest.raises(InvalidMessageError, match="another key"):
        open_signed(Note, signed, SigningKey(b"o" * 32).public)


def test_a_key_is_kept_in_a_file_of_its_own(tmp_path) -> None:
    path = tmp_path / "folder" / "key"
    made = SigningKey.open(path)
    assert SigningKey.open(path).public == made.public and path.stat().st_mode & 0o777 == 0o600
    assert made.public != SigningKey.generate().public
    path.write_text("no key")
    with pytest.raises(UsageError, match="64 hexadecimal"):
        SigningKey.open(path)


def test_orders_follow_from_worker_version_and_number() -> None:
    def of(its=None, worker=b"w" * 32, version=1, weights="f", number=0):
        order = (its or terms()).order(worker, version, weights, number)
        return order.id, order.seeds, order.task.id

    assert of() == of()
    others = [
        of(terms(b"t" * 32)),
        of(terms(run="b")),
        of(worker=b"v" * 32),
        of(version=2),
        of(weights="g"),
        of(number=1),
    ]
    assert len({of()[0], *(id for id, _, _ in others)}) == 7
    seeds = [seed for _, seeds, _ in [of(), *others] for seed in seeds]
    assert len(set(seeds)) == len(seeds) == 28
    # All tasks come up: 400 orders leave one of 50 out with a chance of 50 * 0.98^400, about 2 %; these do not.
    assert {of(number=n)[2] for n in range(400)} == {task.id for task in TASKS}


def test_terms_that_cannot_be_checked_are_refused() -> None:
    good = SamplingParams(max_tokens=8)
    check_sampling(good)
    changes = [{"temperature": 0.0}, {"top_p": 0.9}, {"top_k": 5}, {"min_p": 0.1}, {"n": 2}, {"max_tokens": None}]
    for change in [*changes, {"frequency_penalty": 1.0}, {"ignore_eos": True}, {"temperature": float("nan")}]:
        with pytest.raises(UsageError):
            check_sampling(msgspec.structs.replace(good, **change))


def test_the_share_that_is_rescored_is_as_asked_for() -> None:
    drawn = [terms().is_rescored(str(n), 0.25) for n in range(2000)]
    assert 0.2 < sum(drawn) / len(drawn) < 0.3
    assert all(terms().is_rescored(str(n), 1.0) for n in range(100))


def test_every_episode_may_be_the_one_that_is_computed_again() -> None:
    size = len(terms().order(b"w" * 32, 1, "weights", 0).seeds)
    drawn = [terms().spot(str(n)) for n in range(200 * size)]
    assert size > 1 and set(drawn) == set(range(size)) and all(100 < drawn.count(spot) < 300 for spot in range(size))
    assert drawn == [terms().spot(str(n)) for n in range(200 * size)]
