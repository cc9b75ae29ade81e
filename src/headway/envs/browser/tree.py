"""A page as text: its accessibility tree, with numbers for what can be clicked, typed into or chosen from."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

Style = Literal["tree", "text"]

NUMBERED = frozenset(
    [
        "button",
        "checkbox",
        "combobox",
        "link",
        "listbox",
        "menuitem",
        "option",
        "radio",
        "searchbox",
        "slider",
        "spinbutton",
        "switch",
        "tab",
        "textbox",
    ]
)
_STRUCTURE = frozenset(
    [
        "RootWebArea",
        "none",
        "generic",
        "presentation",
        "paragraph",
        "group",
        "form",
        "Section",
        "LabelText",
        "Legend",
        "rowgroup",
        "LayoutTable",
        "MenuListPopup",
        "listitem",
        "DescriptionList",
        "InlineTextBox",
        "ListMarker",
        "LineBreak",
    ]
)
"""Roles that get no line of their own; what they hold does."""
_LEAVES = NUMBERED | {"heading", "StaticText", "cell", "columnheader", "term", "alert"}
_SPOKEN = {"StaticText": "text"}


@dataclass(frozen=True)
class Line:
    """One line of a page: the node that it stands for, how deep it lies, and its words."""

    node: int
    depth: int
    role: str
    name: str
    state: str


def read_tree(nodes: Sequence[Mapping[str, Any]]) -> list[Line]:
    """Make lines of the nodes of `Accessibility.getFullAXTree`."""
    by_id = {node["nodeId"]: node for node in nodes}
    roots = [node for node in nodes if "parentId" not in node]
    return [line for root in roots for line in _lines(root, by_id, 0)]


def _lines(node: Mapping[str, Any], by_id: Mapping[str, Mapping[str, Any]], depth: int) -> Iterator[Line]:
    role = str(node.get("role", {}).get("value", ""))
    name = " ".join(str(node.get("name", {}).get("value", "")).split())
    children = [by_id[child] for child in node.get("childIds", ()) if child in by_id]
    shown = not node.get("ignored") and role not in _STRUCTURE and bool(name or role not in ("StaticText", "cell"))
    holds = role in _LEAVES and _holds_numbered(children, by_id)
    shown = shown and not (role == "cell" and holds)  # its name would only repeat what it holds
    if shown:
        yield Line(node.get("backendDOMNodeId", 0), depth, role, name, _state(node))
    if shown and role in _LEAVES and (name or role in NUMBERED) and not holds:
        return
    for child in children:
        if role != "LabelText" or child.get("role", {}).get("value") != "StaticText":  # a field has its label as name
            yield from _lines(child, by_id, depth + shown)


def _holds_numbered(children: Sequence[Mapping[str, Any]], by_id: Mapping[str, Mapping[str, Any]]) -> bool:
    """Tell whether something inside has a number, other than a list's options: those are told with the list."""
    for child in children:
        if child.get("role", {}).get("value") in NUMBERED - {"option"} and not child.get("ignored"):
            return True
        if _holds_numbered([by_id[inner] for inner in child.get("childIds", ()) if inner in by_id], by_id):
            return True
    return False


def _state(node: Mapping[str, Any]) -> str:
    told = []
    properties = {item["name"]: item["value"].get("value") for item in node.get("properties", ())}
    role = node.get("role", {}).get("value")
    if value := str(node.get("value", {}).get("value", "")):
        told.append(f'value "{value}"')
    if role in ("checkbox", "radio", "switch"):
        told.append("checked" if properties.get("checked") == "true" else "not checked")
    told += [word for word in ("disabled", "invalid") if str(properties.get(word)).lower() == "true"]
    return ", ".join(told)


def write_lines(lines: Sequence[Line], numbers: Mapping[int, int], style: Style) -> list[str]:
    """Write lines as a model reads them; a row of a table is one line."""
    written: list[str] = []
    row: int | None = None
    for line in lines:
        row = None if row is not None and line.depth <= row else row
        said = _words(line, numbers, style)
        if row is not None and said:
            written[-1] += f"{': ' if written[-1].endswith('row') else ' | '}{said}"
        elif line.role == "row":
            row = line.depth
            written.append(("  " * line.depth if style == "tree" else "") + "row")
        elif said:
            written.append(("  " * line.depth if style == "tree" else "") + said)
    return written


def _words(line: Line, numbers: Mapping[int, int], style: Style) -> str:
    number = f"[{numbers[line.node]}] " if line.node in numbers else ""
    if not number and (style == "text" or line.role in ("cell", "columnheader")):
        return line.name
    said = f'{_SPOKEN.get(line.role, line.role)} "{line.name}"' if line.name else line.role
    return f"{number}{said}{f' ({line.state})' if line.state else ''}"
