"""Integer arithmetic from text, without ever evaluating code."""

import ast
import operator
import random
import re
from collections.abc import Callable

LIMIT = 10**12

_OPERATORS: dict[type[ast.operator], Callable[[int, int], int]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
}


def evaluate(expression: str) -> int:
    """The value of integers joined by + - * // % and parentheses.

    Raises ValueError with a sentence for whoever wrote it: not arithmetic, division by zero, too long or too large.
    """
    if len(expression) > 200:
        raise ValueError("the expression is too long")
    try:
        tree = ast.parse(expression.strip(), mode="eval")
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        raise ValueError("not an arithmetic expression") from None
    return _value(tree.body)


def _value(node: ast.expr) -> int:
    match node:
        case ast.Constant(value=int(number)) if not isinstance(number, bool):
            result = number
        case ast.UnaryOp(op=ast.USub(), operand=operand):
            result = -_value(operand)
        case ast.BinOp(left=left, op=op, right=right) if type(op) in _OPERATORS:
            a, b = _value(left), _value(right)
            if b == 0 and isinstance(op, ast.FloorDiv | ast.Mod):
                raise ValueError("division by zero")
            result = _OPERATORS[type(op)](a, b)
        case _:
            raise ValueError("not an arithmetic expression")
    if abs(result) > LIMIT:
        raise ValueError("the numbers are too large")
    return result


def random_expression(rng: random.Random, terms: int, largest: int, operators: str) -> str:
    """`terms` numbers up to `largest`, joined by signs from `operators`."""
    parts = [str(rng.randint(0, largest))]
    for _ in range(terms - 1):
        parts += [rng.choice(operators), str(rng.randint(0, largest))]
    return " ".join(parts)


def last_number(text: str) -> int | None:
    """The last integer written in `text`: where models put their answer."""
    numbers = re.findall(r"-?\d+", text)
    return int(numbers[-1][:20]) if numbers else None
