"""Bugs: small changes of Python source at places that its syntax tree names.

A mutation replaces bytes of the text, so that all else stays as its author wrote it.
"""

import ast
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache

from headway.base.errors import UsageError

KINDS = ("operator", "boundary", "argument", "branch", "statement", "constant")
SEVERAL = "several"

_COMPARED: dict[type[ast.cmpop], tuple[type[ast.cmpop], str]] = {
    ast.Lt: (ast.LtE, "boundary"),
    ast.LtE: (ast.Lt, "boundary"),
    ast.Gt: (ast.GtE, "boundary"),
    ast.GtE: (ast.Gt, "boundary"),
    ast.Eq: (ast.NotEq, "operator"),
    ast.NotEq: (ast.Eq, "operator"),
    ast.Is: (ast.IsNot, "operator"),
    ast.IsNot: (ast.Is, "operator"),
    ast.In: (ast.NotIn, "operator"),
    ast.NotIn: (ast.In, "operator"),
}
_CALCULATED: dict[type[ast.operator], type[ast.operator]] = {
    ast.Add: ast.Sub,
    ast.Sub: ast.Add,
    ast.Mult: ast.Add,
    ast.FloorDiv: ast.Mult,
    ast.Div: ast.Mult,
    ast.Mod: ast.FloorDiv,
    ast.LShift: ast.RShift,
    ast.RShift: ast.LShift,
    ast.BitAnd: ast.BitOr,
    ast.BitOr: ast.BitAnd,
}


@dataclass(frozen=True, order=True)
class Mutation:
    """Bytes `start` to `end` of a source become `text`."""

    start: int
    end: int
    text: bytes
    kind: str
    first: int
    """The first and last line (from 1) that a test must run for the bug to matter."""
    last: int
    function: str
    """The qualified name of the function around it."""


def mutations(source: bytes) -> list[Mutation]:
    """All bugs that could be planted within functions of a source, in their order in it."""
    try:
        tree = ast.parse(source)
    except (SyntaxError, ValueError):
        return []
    return sorted(_Finder(source).find(tree))


def plant(source: bytes, chosen: Sequence[Mutation]) -> bytes | None:
    """The source with the bugs in it; None where they overlap or the result is no other Python."""
    planted, end = source, len(source) + 1
    for mutation in sorted(chosen, reverse=True):
        if mutation.end > end:
            return None
        planted = planted[: mutation.start] + mutation.text + planted[mutation.end :]
        end = mutation.start
    try:
        same = ast.dump(ast.parse(planted)) == _dumped(source)
    except (SyntaxError, ValueError):
        return None
    return None if same else planted


@lru_cache(maxsize=8)
def _dumped(source: bytes) -> str:
    return ast.dump(ast.parse(source))


class _Finder:
    def __init__(self, source: bytes) -> None:
        self._source = source
        self._starts = [0]
        for line in source.splitlines(keepends=True) if b"\r" not in source else source.split(b"\n"):
            self._starts.append(self._starts[-1] + len(line) + (b"\r" in source))

    def find(self, tree: ast.Module) -> Iterator[Mutation]:
        yield from self._definitions(tree, "")

    def _definitions(self, node: ast.AST, name: str) -> Iterator[Mutation]:
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef):
                inner = f"{name}.{child.name}".lstrip(".")
                yield from self._defaults(child, inner)
                yield from self._block(child.body, inner)
            elif isinstance(child, ast.ClassDef):
                yield from self._definitions(child, f"{name}.{child.name}".lstrip("."))
            elif isinstance(child, ast.If | ast.Try):
                yield from self._definitions(child, name)

    def _defaults(self, function: ast.FunctionDef | ast.AsyncFunctionDef, name: str) -> Iterator[Mutation]:
        """Change default values; the lines that count are those of the body."""
        body = function.body[0].lineno, function.body[-1].end_lineno or function.body[-1].lineno
        for default in [*function.args.defaults, *filter(None, function.args.kw_defaults)]:
            if isinstance(default, ast.Constant) and isinstance(default.value, bool | int):
                value = not default.value if isinstance(default.value, bool) else default.value + 1
                yield self._replace(default, repr(value), "argument", body, name)

    def _block(self, block: list[ast.stmt], name: str) -> Iterator[Mutation]:
        for statement in block:
            yield from self._statement(statement, block, name)

    def _statement(self, statement: ast.stmt, block: list[ast.stmt], name: str) -> Iterator[Mutation]:
        if isinstance(statement, ast.FunctionDef | ast.AsyncFunctionDef):
            yield from self._defaults(statement, f"{name}.{statement.name}")
            yield from self._block(statement.body, f"{name}.{statement.name}")
            return
        if isinstance(statement, ast.ClassDef):
            yield from self._definitions(ast.Module([statement], []), name)
            return
        bodies = [getattr(statement, field, []) for field in ("body", "orelse", "finalbody")]
        handlers: list[ast.ExceptHandler] = getattr(statement, "handlers", [])
        if not any(bodies):
            lines = statement.lineno, statement.end_lineno or statement.lineno
            yield from self._removed(statement, block, lines, name)
            yield from self._expressions(statement, lines, name)
            return
        head = [child for child in ast.iter_child_nodes(statement) if isinstance(child, ast.expr | ast.withitem)]
        for expression in head:
            where = expression.context_expr if isinstance(expression, ast.withitem) else expression
            lines = statement.lineno, where.end_lineno or where.lineno
            yield from self._expressions(expression, lines, name)
        yield from self._branches(statement, block, name)
        for body in [*bodies, *(handler.body for handler in handlers)]:
            yield from self._block(body, name)

    def _branches(self, statement: ast.stmt, block: list[ast.stmt], name: str) -> Iterator[Mutation]:
        if not isinstance(statement, ast.If):
            return
        body = statement.body[0].lineno, statement.body[-1].end_lineno or 0
        test = statement.test
        unparsed = ast.unparse(ast.UnaryOp(ast.Not(), test))
        yield self._replace(test, unparsed, "operator", (statement.lineno, test.end_lineno or test.lineno), name)
        if statement.orelse:
            # From the end of the body to the end of the whole statement lies the other branch.
            other = statement.orelse
            lines = other[0].lineno, other[-1].end_lineno or 0
            start, end = self._end(statement.body[-1]), self._end(other[-1])
            yield Mutation(start, end, b"", "branch", *lines, name)
        else:
            yield from self._removed(statement, block, body, name, "branch")

    def _removed(
        self, statement: ast.stmt, block: list[ast.stmt], lines: tuple[int, int], name: str, kind: str = "statement"
    ) -> Iterator[Mutation]:
        """Remove whole lines, where something else is left of the block."""
        if kind == "statement" and not isinstance(statement, ast.Assign | ast.AugAssign | ast.Expr | ast.Raise):
            return
        if isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant):
            return
        start, end = self._starts[statement.lineno - 1], self._starts[statement.end_lineno or statement.lineno]
        alone = (
            not self._source[start : self._start(statement)].strip()
            and not self._source[self._end(statement) : end].split(b"#")[0].strip()
        )
        elif_ = self._source[self._start(statement) :].startswith(b"elif")
        if len(block) > 1 and alone and not elif_:
            yield Mutation(start, end, b"", kind, *lines, name)

    def _expressions(self, node: ast.AST, lines: tuple[int, int], name: str) -> Iterator[Mutation]:
        """Change expressions below `node`. Those in f-strings have no places of their own before Python 3.12."""
        if isinstance(node, ast.JoinedStr | ast.Lambda) or (isinstance(node, ast.AnnAssign) and node.value is None):
            return
        change = _CHANGES.get(type(node))
        if change is not None and isinstance(node, ast.expr | ast.AugAssign):
            for new, kind in change(node):
                yield self._replace(node, new, kind, lines, name)
        for field, child in ast.iter_fields(node):
            if field == "annotation":
                continue
            for part in child if isinstance(child, list) else [child]:
                if isinstance(part, ast.AST):
                    yield from self._expressions(part, lines, name)

    def _replace(
        self, node: ast.expr | ast.AugAssign, new: str, kind: str, lines: tuple[int, int], name: str
    ) -> Mutation:
        return Mutation(self._start(node), self._end(node), new.encode(), kind, *lines, name)

    def _start(self, node: ast.expr | ast.stmt) -> int:
        return self._starts[node.lineno - 1] + node.col_offset

    def _end(self, node: ast.expr | ast.stmt) -> int:
        assert node.end_lineno is not None and node.end_col_offset is not None
        return self._starts[node.end_lineno - 1] + node.end_col_offset


_Change = Callable[..., Iterator[tuple[str, str]]]


def _compare(node: ast.Compare) -> Iterator[tuple[str, str]]:
    for index, operator in enumerate(node.ops):
        new, kind = _COMPARED[type(operator)]
        ops = [*node.ops[:index], new(), *node.ops[index + 1 :]]
        yield ast.unparse(ast.Compare(node.left, ops, node.comparators)), kind


def _both(node: ast.BoolOp) -> Iterator[tuple[str, str]]:
    yield (
        f"({ast.unparse(ast.BoolOp(ast.Or() if isinstance(node.op, ast.And) else ast.And(), node.values))})",
        "operator",
    )
    for index in range(len(node.values)):
        left = [*node.values[:index], *node.values[index + 1 :]]
        text = ast.unparse(left[0] if len(left) == 1 else ast.BoolOp(node.op, left))
        yield f"({text})" if len(left) == 1 else text, "branch"


def _negated(node: ast.UnaryOp) -> Iterator[tuple[str, str]]:
    if isinstance(node.op, ast.Not | ast.USub):
        yield f"({ast.unparse(node.operand)})", "operator"


def _calculated(node: ast.BinOp) -> Iterator[tuple[str, str]]:
    text = isinstance(node.left, ast.Constant | ast.JoinedStr) and not isinstance(
        getattr(node.left, "value", ""), int | float
    )
    if type(node.op) in _CALCULATED and not text:  # a changed operator of strings would only raise
        yield f"({ast.unparse(ast.BinOp(node.left, _CALCULATED[type(node.op)](), node.right))})", "operator"


def _augmented(node: ast.AugAssign) -> Iterator[tuple[str, str]]:
    if isinstance(node.op, ast.Add | ast.Sub):
        new = ast.Sub() if isinstance(node.op, ast.Add) else ast.Add()
        yield ast.unparse(ast.AugAssign(node.target, new, node.value)), "operator"


def _constant(node: ast.Constant) -> Iterator[tuple[str, str]]:
    if isinstance(node.value, bool):
        yield repr(not node.value), "constant"
    elif isinstance(node.value, int):
        yield repr(node.value + 1), "boundary"
        if node.value > 0:
            yield repr(node.value - 1), "boundary"


def _called(node: ast.Call) -> Iterator[tuple[str, str]]:
    for index in range(len(node.args) - 1):
        one, two = node.args[index : index + 2]
        if not isinstance(one, ast.Starred) and not isinstance(two, ast.Starred):
            args = [*node.args[:index], two, one, *node.args[index + 2 :]]
            yield ast.unparse(ast.Call(node.func, args, node.keywords)), "argument"
    for index, keyword in enumerate(node.keywords):
        if keyword.arg is not None:
            keywords = [*node.keywords[:index], *node.keywords[index + 1 :]]
            yield ast.unparse(ast.Call(node.func, node.args, keywords)), "argument"
    if len(node.args) > 1 and not isinstance(node.args[-1], ast.Starred):
        yield ast.unparse(ast.Call(node.func, node.args[:-1], node.keywords)), "argument"


def _chosen(node: ast.IfExp) -> Iterator[tuple[str, str]]:
    yield f"({ast.unparse(ast.IfExp(node.test, node.orelse, node.body))})", "branch"


_CHANGES: dict[type[ast.AST], _Change] = {
    ast.Compare: _compare,
    ast.BoolOp: _both,
    ast.UnaryOp: _negated,
    ast.BinOp: _calculated,
    ast.AugAssign: _augmented,
    ast.Constant: _constant,
    ast.Call: _called,
    ast.IfExp: _chosen,
}


def check_kinds(kinds: Sequence[str]) -> None:
    """Raise UsageError for a kind of bug that there is not."""
    for kind in kinds:
        if kind not in (*KINDS, SEVERAL):
            raise UsageError(f"no kind of bug is called {kind!r}; they are {', '.join((*KINDS, SEVERAL))}")
