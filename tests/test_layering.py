"""Imports point down the floors, never up or in a circle, and the three processes never import each other.

Imports inside functions and under TYPE_CHECKING count like all others.
"""

import ast
from collections.abc import Iterator
from functools import cache
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

SOURCE = Path(__file__).parents[1] / "src" / "headway"
FLOORS = [
    {"base"},
    {"core"},
    {"config", "models", "rendering", "transport", "monitor", "sandboxes"},
    {"envs", "algorithms"},
    {"swarm"},
    {"trainer", "inference", "orchestrator"},
    {"launch", "replay", "plan"},
    {"cli", "api"},
]
FLOOR = {room: height for height, rooms in enumerate(FLOORS) for room in rooms}
PROCESSES = {"trainer", "inference", "orchestrator"}


def module_of(file: Path) -> str:
    parts = ("headway", *file.relative_to(SOURCE).with_suffix("").parts)
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def imported_modules(file: Path) -> Iterator[str]:
    """Yield every module that a file imports, anywhere in it, by its full name."""
    package = ("headway", *file.relative_to(SOURCE).parent.parts)
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else ()
            module = ".".join((*base, *([node.module] if node.module else [])))
            names = {alias.name for alias in node.names}
            submodules = {name for name in names if f"{module}.{name}" in MODULES}
            if submodules != names:
                yield module
            yield from (f"{module}.{name}" for name in submodules)


FILES = sorted(SOURCE.rglob("*.py"))
MODULES = {module_of(file) for file in FILES}


@cache
def imports() -> dict[str, set[str]]:
    """What each module imports. Not read before a test asks: every worker collects, but only one runs these tests."""
    return {module_of(file): set(imported_modules(file)) - {module_of(file)} for file in FILES}


def room_of(module: str) -> str | None:
    parts = module.split(".")
    return parts[1] if parts[0] == "headway" and len(parts) > 1 else None


def check_no_circle(edges: dict[str, set[str]]) -> None:
    try:
        TopologicalSorter(edges).prepare()
    except CycleError as error:
        pytest.fail("a circle of imports: " + " -> ".join(reversed(error.args[1])))


def test_every_room_has_a_floor() -> None:
    assert {room_of(module) for module in MODULES} - {None} == set(FLOOR)


@pytest.mark.parametrize("room", sorted(FLOOR))
def test_imports_point_down(room: str) -> None:
    wrong = []
    for module in (module for module in MODULES if room_of(module) == room):
        for imported in imports()[module]:
            other = room_of(imported)
            if other in (None, room):
                continue
            if FLOOR[other] > FLOOR[room] or {room, other} <= PROCESSES:
                wrong.append(f"{module} imports {imported}")
    assert not wrong, "\n".join(wrong)


def test_the_package_itself_imports_no_room() -> None:
    assert not any(room_of(imported) for imported in imports()["headway"])


@pytest.mark.parametrize("room", ["base", "core"])
def test_it_has_no_torch(room: str) -> None:
    core = {module: imports()[module] for module in MODULES if room_of(module) == room}
    wrong = [module for module, imported in core.items() if any(name.split(".")[0] == "torch" for name in imported)]
    assert core and not wrong


def test_no_modules_import_each_other_in_a_circle() -> None:
    check_no_circle({module: imported & MODULES for module, imported in imports().items()})


@pytest.mark.parametrize("folder", sorted({module.rpartition(".")[0] for module in MODULES} - {""}))
def test_what_lies_in_a_folder_does_not_import_each_other_in_a_circle(folder: str) -> None:
    """Files of a folder and its folders, each taken as one."""

    def part_of(module: str) -> str:
        return module.removeprefix(f"{folder}.").partition(".")[0] if module.startswith(f"{folder}.") else ""

    edges: dict[str, set[str]] = {}
    for module, imported in imports().items():
        if part := part_of(module):
            edges.setdefault(part, set()).update({part_of(name) for name in imported & MODULES} - {part, ""})
    assert edges
    check_no_circle(edges)


def test_every_room_says_what_lives_there() -> None:
    for room in FLOOR:
        assert ast.get_docstring(ast.parse((SOURCE / room / "__init__.py").read_text())), room


def named(node: ast.expr) -> str:
    """The last name in what is read or written: b in `a.b` and in `a.b[c]`."""
    if isinstance(node, ast.Subscript):
        return named(node.value)
    return node.attr if isinstance(node, ast.Attribute) else node.id if isinstance(node, ast.Name) else ""


def written_attributes(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """Line and name of every attribute that is assigned, by a statement or by setattr."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Assign | ast.AugAssign | ast.AnnAssign):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            for target in (part for t in targets for part in (t.elts if isinstance(t, ast.Tuple) else [t])):
                if not isinstance(target, ast.Name):
                    yield node.lineno, named(target)
        elif isinstance(node, ast.Call) and named(node.func) in ("setattr", "__setattr__"):
            yield from ((node.lineno, str(arg.value)) for arg in node.args if isinstance(arg, ast.Constant))


def texts_with(*words: str) -> Iterator[tuple[Path, str]]:
    """Files with one of these words; to parse all takes seconds."""
    texts = ((file, file.read_text()) for file in SOURCE.rglob("*.py"))
    return ((file, text) for file, text in texts if any(word in text for word in words))


def test_modules_are_not_patched() -> None:
    """What a module computes and with which parameters is decided when it is built."""
    wrong = [
        f"{file.relative_to(SOURCE)}:{line} writes {name}"
        for file, text in texts_with("forward", "_parameters")
        for line, name in written_attributes(ast.parse(text))
        if name in ("forward", "_parameters")
    ]
    assert not wrong, "\n".join(wrong)
    found = [name for _, name in written_attributes(ast.parse("a.forward = b; a._parameters[c], d.e = f, g"))]
    assert found == ["forward", "_parameters", "e"]


def test_nobody_asks_what_kind_of_attention_plan_it_has() -> None:
    wrong = []
    for file, text in texts_with("isinstance"):
        for node in ast.walk(ast.parse(text)) if "plan" in text.lower() else ():
            if isinstance(node, ast.Call) and named(node.func) == "isinstance" and "plan" in ast.unparse(node).lower():
                wrong.append(f"{file.relative_to(SOURCE)}:{node.lineno} {ast.unparse(node)}")
    assert not wrong, "\n".join(wrong)
