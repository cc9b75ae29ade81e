"""Whatever settings are given: a file and flags resolve to the same thing, and so does what is written back."""

import json
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any, Literal, get_args, get_origin

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from pydantic import Field

from headway.base.errors import UsageError
from headway.config.base import Settings
from headway.config.flags import dotted_names
from headway.config.loader import load_settings, write_settings
from headway.config.rl import RlSettings
from headway.config.schema import Kind
from headway.config.toml import dump

PATIENT = settings(derandomize=True, deadline=None, suppress_health_check=[HealthCheck.too_slow])
"""The same examples every time, however slow the machine is."""

names = st.from_regex(r"[a-z][a-z0-9_]{0,6}", fullmatch=True)
texts = st.one_of(names, st.sampled_from(["none", "true", "5", "1e-3", "--x", "[1]", 'a"b', "ü\n", "a#b", "\x7f", ""]))
numbers = st.floats(allow_nan=False, allow_infinity=False)
anything = st.recursive(
    st.one_of(st.booleans(), st.integers(-(2**60), 2**60), numbers, texts),
    lambda inner: st.one_of(st.lists(inner, max_size=3), st.dictionaries(names, inner, max_size=3)),
    max_leaves=5,
)


def values(kind: Kind) -> st.SearchStrategy[Any]:
    """Values that TOML can hold and that a setting of this kind might be given, right or slightly wrong."""
    if kind.is_settings:
        return st.one_of(*(tables(model) for model in kind.models))
    member = kind.members[0]
    if kind.is_list:
        return st.lists(values(kind.item()), max_size=2)
    if kind.is_table:
        return st.dictionaries(names, values(kind.item()), max_size=3)
    if get_origin(member) is Literal:
        return st.sampled_from(get_args(member))
    if get_origin(member) is tuple:
        return st.lists(numbers, min_size=2, max_size=2)
    scalars = {bool: st.booleans(), int: st.integers(-1, 1000), float: st.one_of(st.integers(0, 9), numbers)}
    return scalars.get(member, anything if member is Any else texts)


def tables(model: type[Settings]) -> st.SearchStrategy[dict[str, Any]]:
    fields = Kind(model).fields()
    needed = {name: values(field.kind) for name, field in fields.items() if name == "type" or field.required}
    return st.fixed_dictionaries(needed, optional={k: values(f.kind) for k, f in fields.items() if k not in needed})


def flags(value: Any, kind: Kind, path: str = "", whole_lists: bool = False) -> Iterator[str]:
    """The same settings as flags, one for each leaf; lists of tables item by item, or whole as files give them."""
    tables_below = kind.is_settings or kind.is_table
    if path and isinstance(value, dict) and not (tables_below and value):
        yield f"--{path}={json.dumps(value)}"
    elif isinstance(value, dict):
        branch = kind.tagged(value.get("type"))
        for key, item in value.items():
            yield from flags(item, branch.child(key), f"{path}.{key}" if path else key, whole_lists)
    elif kind.is_list and kind.item().is_settings and value and not whole_lists:
        for index, item in enumerate(value):
            yield from flags(item, kind.item(), f"{path}.{index}")
    else:
        yield f"--{path}={value if kind.is_text else json.dumps(value)}"


class Cat(Settings):
    type: Literal["cat"] = "cat"
    lives: int = 9
    mood: Literal["none", "fine"] = "fine"


class Dog(Settings):
    type: Literal["dog"] = "dog"
    lives: float | None = 1.0
    friends: list[Cat] = []


class Keeper(Settings):
    name: str
    nick: str | None = "none yet"
    pet: Annotated[Cat | Dog, Field(discriminator="type")] = Dog(lives=None)
    spare: Annotated[Cat | Dog, Field(discriminator="type")] | None = None
    notes: dict[str, Any] = {"a": 1}


class Zoo(Settings):
    """Every shape that settings have, and no rule, so that whatever is generated is accepted."""

    open: bool = True
    folder: Path = Path("zoo")
    hours: tuple[float, float] = (9, 17)
    signs: list[str] = ["keep out"]
    prices: dict[str, float] = {}
    boss: Keeper = Keeper(name="boss", notes={"b": 2})
    keepers: list[Keeper] = []


def outcome(kind: type[Settings], argv: list[str]) -> Settings | None:
    try:
        return load_settings(kind, argv).settings
    except UsageError:
        return None


def check(kind: type[Settings], raw: dict[str, Any]) -> Settings | None:
    """What a file resolves to, once it is sure that flags and the written-back file resolve to the same."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "a.toml"
        path.write_text(dump(raw))
        from_file = outcome(kind, ["@", str(path)])
        assert from_file == outcome(kind, list(flags(raw, Kind(kind))))
        if from_file is not None:
            write_settings(from_file, path)
            assert outcome(kind, ["@", str(path)]) == from_file
    return from_file


@settings(PATIENT, max_examples=200)
@given(raw=tables(Zoo))
def test_files_and_flags_resolve_to_the_same(raw: dict[str, Any]) -> None:
    assert check(Zoo, raw) is not None


@settings(PATIENT, max_examples=50)
@given(raw=tables(RlSettings))
def test_a_run_resolves_to_the_same_from_files_and_flags_even_when_refused(raw: dict[str, Any]) -> None:
    check(RlSettings, raw)


@settings(PATIENT, max_examples=100)
@given(below=tables(Zoo), above=tables(Zoo))
def test_a_later_file_and_flags_win_over_an_earlier_file_alike(below: dict[str, Any], above: dict[str, Any]) -> None:
    with tempfile.TemporaryDirectory() as folder:
        first, second = Path(folder) / "a.toml", Path(folder) / "b.toml"
        first.write_text(dump(below))
        second.write_text(dump(above))
        layered = outcome(Zoo, ["@", str(first), "@", str(second)])
        assert layered is not None
        assert layered == outcome(Zoo, ["@", str(first), *flags(above, Kind(Zoo), whole_lists=True)])


words = st.one_of(
    st.sampled_from(
        ["@", "--", "-", "--no-", "--dry-run", "none", "{}", "[]", "[1", "true", "-1", "x=y", "--=", "--.=1"]
    ),
    st.builds(
        "--{}{}".format, st.sampled_from(dotted_names(Kind(RlSettings))), st.sampled_from(["", ".", ".0", ".x", "="])
    ),
    st.builds("--{}={}".format, st.sampled_from(dotted_names(Kind(RlSettings))), anything.map(json.dumps)),
    st.builds("--no-{}".format, st.sampled_from(dotted_names(Kind(RlSettings)))),
    st.text(max_size=5),
)


@settings(PATIENT, max_examples=200)
@given(argv=st.lists(words, max_size=6))
def test_any_command_line_resolves_or_is_refused_in_words(argv: list[str]) -> None:
    try:
        load_settings(RlSettings, argv)
    except UsageError as error:
        assert str(error)


@settings(PATIENT, max_examples=100)
@given(table=st.dictionaries(st.one_of(names, st.sampled_from(list(RlSettings.model_fields))), anything, max_size=4))
def test_any_file_resolves_or_is_refused_in_words(table: dict[str, Any]) -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "a.toml"
        path.write_text(dump(table))
        try:
            load_settings(RlSettings, ["@", str(path)])
        except UsageError as error:
            assert str(error)
