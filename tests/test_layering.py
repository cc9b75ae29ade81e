"""Imports point down the floors, never up, and the three processes never import each other."""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

SOURCE = Path(__file__).parents[1] / "src" / "headway"
FLOORS = [
    {"core"},
    {"config", "models", "rendering", "transport", "monitor"},
    {"envs", "algorithms"},
    {"trainer", "inference", "orchestrator"},
    {"launch"},
    {"cli"},
]
FLOOR = {room: height for height, rooms in enumerate(FLOORS) for room in rooms}
PROCESSES = {"trainer", "inference", "orchestrator"}


def imported_modules(file: Path) -> Iterator[str]:
    """Every module of headway that a file imports, anywhere in it, by its full name."""
    package = ("headway", *file.relative_to(SOURCE).parent.parts)
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else ()
            module = ".".join((*base, *([node.module] if node.module else [])))
            yield module
            yield from (f"{module}.{alias.name}" for alias in node.names)


def room_of(module: str) -> str | None:
    parts = module.split(".")
    return parts[1] if parts[0] == "headway" and len(parts) > 1 and parts[1] in FLOOR else None


def source_files() -> list[Path]:
    return sorted(file for file in SOURCE.rglob("*.py") if file.parent != SOURCE)


def test_every_room_has_a_floor() -> None:
    rooms = {file.relative_to(SOURCE).parts[0] for file in source_files()}
    assert rooms == set(FLOOR)


@pytest.mark.parametrize("room", sorted(FLOOR))
def test_imports_point_down(room: str) -> None:
    wrong = []
    for file in (file for file in source_files() if file.relative_to(SOURCE).parts[0] == room):
        for module in imported_modules(file):
            other = room_of(module)
            if other is None or other == room:
                continue
            if FLOOR[other] > FLOOR[room] or {room, other} <= PROCESSES:
                wrong.append(f"{file.relative_to(SOURCE)} imports {module}")
    assert not wrong, "\n".join(wrong)


def test_core_has_no_torch() -> None:
    core = [file for file in source_files() if file.parent.name == "core"]
    wrong = [
        f"{file.name}: {module}"
        for file in core
        for module in imported_modules(file)
        if module.split(".")[0] == "torch"
    ]
    assert core and not wrong


def test_rooms_on_one_floor_do_not_import_in_circles() -> None:
    edges: dict[str, set[str]] = {room: set() for room in FLOOR}
    for file in source_files():
        room = file.relative_to(SOURCE).parts[0]
        others = {other for module in imported_modules(file) if (other := room_of(module)) and other != room}
        edges[room] |= {other for other in others if FLOOR[other] == FLOOR[room]}
    left = dict(edges)
    while free := [room for room, others in left.items() if not others & left.keys()]:
        for room in free:
            del left[room]
    assert not left, f"circular imports between {sorted(left)}"


def test_every_room_says_what_lives_there() -> None:
    for room in FLOOR:
        assert ast.get_docstring(ast.parse((SOURCE / room / "__init__.py").read_text())), room
