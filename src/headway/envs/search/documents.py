"""Documents of the standard library: what each module says of its classes, read from its source without running it."""

import ast
import sys
import sysconfig
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

_LEFT_OUT = {"test", "tests", "idlelib", "lib2to3", "turtledemo", "ensurepip", "this", "antigravity"}


@dataclass(frozen=True)
class ClassEntry:
    """A class in a document. `base` is the full name of the first class that it derives from, where that is known;
    `method` the first of its public methods that has a description."""

    name: str
    base: str | None
    method: str | None


@dataclass(frozen=True)
class Document:
    """The text about one module, whose name is the document's, and the classes in it by name.

    `names` are those of all public classes, functions and methods in the text.
    """

    name: str
    text: str
    classes: dict[str, ClassEntry] = field(default_factory=dict)
    names: frozenset[str] = frozenset()


def library_documents(modules: Sequence[str] | None = None) -> list[Document]:
    """Documents of `modules` and all that lies in them, by name. Default: all public modules of the library."""
    folder = Path(sysconfig.get_paths()["stdlib"])
    names = sorted(name for name in sys.stdlib_module_names if not name.startswith("_"))
    wanted = [name for name in names if (name in modules if modules is not None else name not in _LEFT_OUT)]
    files = [file for name in wanted for file in _files(folder, name)]
    return [_read(_module_name(folder, file), file) for file in files]


def _files(folder: Path, name: str) -> Iterator[Path]:
    if (folder / f"{name}.py").is_file():
        yield folder / f"{name}.py"
    for file in sorted((folder / name).rglob("*.py")):
        if not _LEFT_OUT & set(file.relative_to(folder).parts):
            yield file


def _module_name(folder: Path, file: Path) -> str:
    parts = file.relative_to(folder).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def _read(name: str, file: Path) -> Document:
    tree = ast.parse(file.read_bytes())
    known = _imported(tree, name if file.name == "__init__.py" else name.rpartition(".")[0])
    known |= {node.name: f"{name}.{node.name}" for node in tree.body if isinstance(node, ast.ClassDef)}
    lines, classes = [f"module {name}", *_described(tree, ""), ""], {}
    for node in tree.body:
        if isinstance(node, ast.ClassDef):
            entry = classes[node.name] = _class_entry(node, known)
            lines += [*_class_lines(node, entry), ""]
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and ast.get_docstring(node):
            lines += [*_function_lines(node, ""), ""]
    return Document(name, "\n".join(lines).rstrip() + "\n", classes, frozenset(_public_names(tree)))


def _public_names(tree: ast.Module) -> Iterator[str]:
    """Yield the names that have a line in the document."""
    for node in tree.body:
        inside = _methods(node) if isinstance(node, ast.ClassDef) else []
        functions = [item for item in (node, *inside) if isinstance(item, ast.FunctionDef | ast.AsyncFunctionDef)]
        described = [function.name for function in functions if ast.get_docstring(function)]
        classes = [node.name] if isinstance(node, ast.ClassDef) else []
        yield from (name for name in (*classes, *described) if not name.startswith("_"))


def _imported(tree: ast.Module, package: str) -> dict[str, str]:
    """The full names of what a module imports at its top."""
    known: dict[str, str] = {}
    for node in tree.body:
        if isinstance(node, ast.Import):
            heads = [name if name.asname else ast.alias(name.name.partition(".")[0]) for name in node.names]
            known |= {head.asname or head.name: head.name for head in heads}
        elif isinstance(node, ast.ImportFrom):
            above = package.split(".")[: len(package.split(".")) - node.level + 1] if node.level else []
            source = ".".join([*above, *([node.module] if node.module else [])])
            known |= {(a.asname or a.name): f"{source}.{a.name}" for a in node.names}
    return known


def _class_entry(node: ast.ClassDef, known: dict[str, str]) -> ClassEntry:
    base = ast.unparse(node.bases[0]) if node.bases else ""
    head, dot, rest = base.partition(".")
    full = known[head] + dot + rest if head in known else None
    described = [m.name for m in _methods(node) if ast.get_docstring(m) and not m.name.startswith("_")]
    return ClassEntry(node.name, full, described[0] if described else None)


def _methods(node: ast.ClassDef) -> list[ast.FunctionDef | ast.AsyncFunctionDef]:
    return [item for item in node.body if isinstance(item, ast.FunctionDef | ast.AsyncFunctionDef)]


def _class_lines(node: ast.ClassDef, entry: ClassEntry) -> list[str]:
    lines = [f"class {node.name}"]
    if entry.base is not None:
        lines.append(f"    derives from {entry.base}")
    lines += _described(node, "    ")
    for method in _methods(node):
        if ast.get_docstring(method):
            lines += _function_lines(method, "    ")
    return lines


def _function_lines(node: ast.FunctionDef | ast.AsyncFunctionDef, indent: str) -> list[str]:
    return [f"{indent}def {node.name}({ast.unparse(node.args)})", *_described(node, indent + "    ")]


def _described(node: ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef, indent: str) -> list[str]:
    return [f"{indent}{line}".rstrip() for line in (ast.get_docstring(node) or "").splitlines()]
