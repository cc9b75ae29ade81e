"""Layers of raw settings: nested values that remember where they came from, and how a later layer wins."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from headway.base.errors import UsageError
from headway.config.schema import Kind, is_none_text

DEFAULT = "default"


@dataclass(frozen=True)
class Leaf:
    """A value that is replaced as a whole, and the file or flag that set it."""

    value: Any
    origin: str


Tree = dict[str, "Tree"] | list["Tree"] | Leaf


def to_tree(value: Any, origin: str) -> Tree:
    """Make a raw value from one layer a tree. Lists of tables keep their items apart, other lists are leaves."""
    if isinstance(value, Mapping):
        return {str(key): to_tree(item, origin) for key, item in value.items()}
    if isinstance(value, list) and value and all(isinstance(item, Mapping) for item in value):
        return [to_tree(item, origin) for item in value]
    return Leaf(value, origin)


def defaults(kind: Kind) -> dict[str, Tree]:
    """Return what a settings class sets before any layer: the `type` of unions, and defaults given as instances."""
    tree: dict[str, Tree] = {}
    for name, field in kind.fields().items():
        value = field.default
        if field.kind.is_settings and hasattr(value, "model_dump"):
            branch = Kind(type(value))
            given = {key: to_tree(item, DEFAULT) for key, item in value.model_dump(exclude_unset=True).items()}
            if field.kind.tags:
                given["type"] = Leaf(value.type, DEFAULT)
            tree[name] = merge(defaults(branch), given, branch)
    return tree


def merge(below: Tree | None, above: Tree, kind: Kind) -> Tree:
    """Lay `above` over `below`: tables merge key by key, everything else is replaced.

    A union whose `type` changes keeps nothing of its former member. A list is patched when `above` is a
    table of indices (which only flags make).
    """
    if isinstance(above, Leaf):
        return Leaf(None, above.origin) if kind.optional and is_none_text(above.value) else above
    if isinstance(above, list):
        return [merge(_fresh(kind.item()), item, kind.item()) for item in above]
    if kind.is_list and above and all(key.isdigit() for key in above):
        return _patch(below, above, kind)
    base = dict(below) if isinstance(below, dict) else _fresh(kind)
    if kind.tags and "type" in above and _tag(above) != _tag(base):
        base = {}
    branch = kind.tagged(_tag(above) or _tag(base))
    base = base or _fresh(branch)
    return base | {key: merge(base.get(key), item, branch.child(key)) for key, item in above.items()}


def put(tree: Tree | None, path: list[str], value: Tree) -> Tree:
    """Return the tree with `value` at `path`, over what was there. Raises UsageError for an index that is too large."""
    if not path:
        return value
    key, *rest = path
    items = _items(tree)
    if items is not None and key.isdigit():
        old = items[int(key)] if int(key) < len(items) else None
        return _with_item(items, int(key), put(old, rest, value), value)
    table = tree if isinstance(tree, dict) else {}
    return table | {key: put(table.get(key), rest, value)}


def leaves(tree: Tree, path: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], Leaf]]:
    """Yield every leaf with its path, in order."""
    if isinstance(tree, Leaf):
        yield path, tree
        return
    items = tree.items() if isinstance(tree, dict) else ((str(i), item) for i, item in enumerate(tree))
    for key, item in items:
        yield from leaves(item, (*path, key))


def plain(tree: Tree, kind: Kind) -> Any:
    """Return the values without their origins, in the types that a strict validation wants."""
    if isinstance(tree, Leaf):
        return kind.from_toml(tree.value)
    if isinstance(tree, list):
        return [plain(item, kind.item()) for item in tree]
    branch = kind.tagged(_tag(tree))
    return {key: plain(item, branch.child(key)) for key, item in tree.items()}


def _fresh(kind: Kind) -> dict[str, Tree]:
    return defaults(kind) if kind.is_model else {}


def _tag(tree: dict[str, Tree]) -> Any:
    leaf = tree.get("type")
    return leaf.value if isinstance(leaf, Leaf) else None


def _patch(below: Tree | None, patch: dict[str, Tree], kind: Kind) -> Tree:
    """Change some items of a list, by index; the index after the last one adds an item."""
    items = _items(below) or []
    for index in sorted(map(int, patch)):
        above = patch[str(index)]
        old = items[index] if index < len(items) else None
        items = _with_item(items, index, merge(old, above, kind.item()), above)
    return items


def _items(tree: Tree | None) -> list[Tree] | None:
    """Return the items of a list, whether it is a leaf or not; None where it is no list."""
    if isinstance(tree, Leaf) and isinstance(tree.value, list):
        return [to_tree(item, tree.origin) for item in tree.value]
    return tree if isinstance(tree, list) else None


def _with_item(items: list[Tree], index: int, item: Tree, source: Tree) -> list[Tree]:
    """Return the items with one changed, or added after the last. Raises UsageError, naming `source`, past that."""
    if index > len(items):
        origin = next((f"{leaf.origin}: " for _, leaf in leaves(source)), "")
        raise UsageError(f"{origin}there are only {len(items)} items; the next index is {len(items)}")
    return [*items[:index], item, *items[index + 1 :]]
