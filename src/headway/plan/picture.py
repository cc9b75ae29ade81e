"""A plan as a picture, an SVG file: memory by what it is for, a step by its parts, and other layouts and settings."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from xml.sax.saxutils import escape

from headway.plan.planning import Plan, Planned
from headway.plan.report import (
    HOLDERS,
    SMALLEST_GIB,
    compare_step,
    fastest_first,
    format_seconds,
    run_length,
    split_marks,
    split_name,
)

WIDTH, EDGE = 940, 24
BAR, ROW = 22, 30
"""Height of a bar, and from one to the next."""
LABEL = 150
"""Width of the names left of the bars, where none is longer."""
CHARACTER = 6.6
"""Width of a character of a label: none is wider on the mean, whatever font a browser takes."""
COLORS = {
    "weights": "c1", "gradients": "c2", "optimizer": "c3", "activations": "c4", "head": "c5", "working copy": "c6",
    "updates": "c7", "fragments": "c8", "spare": "c6", "steps": "c4", "images": "c2", "KV": "c3", "process": "ink",
    "training": "c1", "sampling": "c3", "step": "c1",
}  # fmt: skip
"""Color of a part; parts that are never in one bar may share one."""
LIGHT = {
    "card": "#ffffff", "ink": "#1a2030", "soft": "#5d6679", "line": "#dfe3ea", "c1": "#2563eb", "c2": "#d9480f",
    "c3": "#12805c", "c4": "#8a3ffc", "c5": "#b5179e", "c6": "#0b7285", "c7": "#946200", "c8": "#5c677d",
}  # fmt: skip
DARK = {
    "card": "#181e28", "ink": "#e6eaf2", "soft": "#98a3b8", "line": "#2a3342", "c1": "#6ea8fe", "c2": "#ffa657",
    "c3": "#4cc9a0", "c4": "#c297ff", "c5": "#f778ba", "c6": "#56d4dd", "c7": "#e3b341", "c8": "#a7b1c2",
}  # fmt: skip
"""The dashboard's colors. In each theme, text in the color of the card is readable on all of c1 to c8."""


@dataclass(frozen=True)
class Piece:
    """A piece of a bar: its name, its size in the bar's unit, and the size as it is written."""

    name: str
    size: float
    written: str
    color: str

    @property
    def label(self) -> str:
        return f"{self.name} {self.written}"


@dataclass
class Drawing:
    """Elements of an SVG file, from the top down; `y` is where the next one begins."""

    y: float = EDGE
    elements: list[str] = field(default_factory=list)

    def text(self, x: float, words: str, style: str = "", below: float = 0.0) -> None:
        """Write a line whose middle is `below` of `y`."""
        self.elements.append(f'<text class="{style}" x="{x:.1f}" y="{self.y + below + 4:.1f}">{escape(words)}</text>')

    def rect(self, x: float, width: float, color: str, words: str) -> None:
        """Draw a part of a bar, with `words` for a mouse that rests on it and for screen readers."""
        place = f'x="{x:.2f}" y="{self.y:.1f}" width="{width:.2f}" height="{BAR}"'
        self.elements.append(f'<rect class="{color}" {place}><title>{escape(words)}</title></rect>')

    def heading(self, words: str) -> None:
        self.y += 22
        self.text(EDGE, words, "head")
        self.y += 20

    def bar(self, left: float, scale: float, whole: float, label: str, pieces: Sequence[Piece]) -> None:
        """Draw a bar of `pieces` on a track for `whole`, and list those below it whose labels do not fit into it."""
        self.text(EDGE, label, below=BAR / 2)
        self.rect(left, scale * whole, "track", label)
        x, listed = left, []
        for piece in pieces:
            width = scale * piece.size
            self.rect(x, width, piece.color, f"{label}: {piece.label}")
            if CHARACTER * len(piece.label) + 8 <= width:
                self.text(x + 5, piece.label, "in" if piece.color != "track" else "soft", below=BAR / 2)
            else:
                listed.append(piece)
            x += width
        self.y += ROW
        self._list(left, listed)

    def _list(self, left: float, pieces: Sequence[Piece]) -> None:
        """Name the narrow pieces of the bar above, each with a spot of its color."""
        x = left
        for piece in pieces:
            width = CHARACTER * len(piece.label) + 30
            if x + width > WIDTH - EDGE and x > left:
                x, self.y = left, self.y + 18
            self.elements.append(f'<circle class="{piece.color}" cx="{x + 5:.1f}" cy="{self.y + 6:.1f}" r="5"/>')
            self.text(x + 15, piece.label, "soft", below=6)
            x += width
        if pieces:
            self.y += 26

    def svg(self, title: str) -> str:
        height = self.y + EDGE
        return "\n".join(
            [
                f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height:.0f}" role="img" '
                "font-family=\"system-ui, -apple-system, 'Segoe UI', 'Noto Sans', 'DejaVu Sans', sans-serif\">",
                f"<title>{escape(title)}</title>",
                f"<style>\n{_style(LIGHT)}\n@media (prefers-color-scheme: dark) {{ {_style(DARK)} }}\n</style>",
                f'<rect class="card" width="{WIDTH}" height="{height:.0f}" rx="10"/>',
                *self.elements,
                "</svg>\n",
            ]
        )


def plan_picture(plan: Plan) -> str:
    """Draw a plan as the text of an SVG file, which follows the light or dark theme of whoever looks at it."""
    near, drawing = plan.own or plan.fastest, Drawing()
    title = f"{split_name(near)} ({plan.device}): a step takes {format_seconds(near.forecast.step_seconds)}"
    drawing.text(EDGE, title, "title")
    drawing.y += 22
    drawing.text(EDGE, f"{run_length(plan, near)}. Bottleneck: {plan.bottleneck}", "soft")
    drawing.y += 10
    if plan.memory:
        _draw_memory(drawing, plan)
    _draw_step(drawing, plan, near)
    layouts = [(split_name(one), one.forecast.step_seconds, split_marks(plan, one)) for one in fastest_first(plan)]
    _draw_steps(drawing, "Layouts: time of a step", near, layouts if len(layouts) > 1 else [])
    changes = [(change.what, change.forecast.step_seconds, compare_step(near, change)) for change in plan.changes]
    _draw_steps(drawing, "If a setting were another: time of a step", near, changes)
    return drawing.svg(title)


def _draw_memory(drawing: Drawing, plan: Plan) -> None:
    drawing.heading(f"Memory of a GPU in GiB, of {plan.usable_gib:.1f} that it has to give")
    left = EDGE + LABEL
    scale = (WIDTH - EDGE - left) / max(plan.usable_gib, *(sum(parts.values()) for parts in plan.memory.values()))
    for who, parts in plan.memory.items():
        pieces = [
            Piece(name, size, f"{size:.1f}", COLORS.get(name, "ink"))
            for name, size in parts.items()
            if size >= SMALLEST_GIB
        ]
        if (free := plan.usable_gib - sum(parts.values())) >= SMALLEST_GIB:
            pieces.append(Piece("free", free, f"{free:.1f}", "track"))
        drawing.bar(left, scale, plan.usable_gib, f"{HOLDERS[who]} {sum(parts.values()):.1f}", pieces)


def _draw_step(drawing: Drawing, plan: Plan, near: Planned) -> None:
    drawing.heading("A step: who works, and who waits")
    expected, left = near.forecast, EDGE + LABEL
    whole, idle = expected.step_seconds, expected.engines_idle * expected.step_seconds
    measured = plan.measured.step_seconds if plan.measured else 0.0
    scale = (WIDTH - EDGE - left) / max(whole, measured)

    def seconds(name: str, size: float) -> Piece:
        return Piece(name, size, format_seconds(size), COLORS.get(name, "track"))

    training = expected.training_seconds
    waiting = [seconds("waits", whole - training)] if whole - training > 0.005 * whole else []
    drawing.bar(left, scale, whole, "trainer", [seconds("training", training), *waiting])
    resting = [seconds("idle", idle)] if idle > 0.005 * whole else []
    drawing.bar(left, scale, whole, "engines", [seconds("sampling", whole - idle), *resting])
    if measured:
        drawing.bar(left, scale, measured, "measured", [seconds("step", measured)])


def _draw_steps(drawing: Drawing, heading: str, near: Planned, rows: Sequence[tuple[str, float, str]]) -> None:
    """Draw a bar for each of `rows`, its step time and a note, and a line where the looked-at layout's step ends."""
    if not rows:
        return
    drawing.heading(heading)
    left = EDGE + max(LABEL, CHARACTER * max(len(name) for name, _, _ in rows) + 10)
    right = WIDTH - EDGE - 75 - CHARACTER * max(len(note) for _, _, note in rows)
    scale = (right - left) / max(near.forecast.step_seconds, *(took for _, took, _ in rows))
    top = drawing.y
    for name, took, note in rows:
        drawing.text(EDGE, name, below=BAR / 2)
        drawing.rect(left, scale * took, COLORS["step"], f"{name}: {format_seconds(took)}")
        drawing.text(right + 10, format_seconds(took), below=BAR / 2)
        drawing.text(right + 75, note, "soft", below=BAR / 2)
        drawing.y += ROW
    x = left + scale * near.forecast.step_seconds
    bottom = drawing.y - ROW + BAR
    drawing.elements.append(f'<line x1="{x:.2f}" x2="{x:.2f}" y1="{top - 4:.1f}" y2="{bottom + 4:.1f}"/>')


def _style(colors: dict[str, str]) -> str:
    plain = " ".join(f".{name} {{ fill: {color} }}" for name, color in colors.items())
    return (
        f"text {{ fill: {colors['ink']}; font-size: 12px }} {plain} .title {{ font-size: 17px; font-weight: 650 }} "
        f".head {{ font-size: 14px; font-weight: 650 }} .in {{ fill: {colors['card']} }} "
        f".track {{ fill: {colors['line']} }} rect {{ stroke: {colors['card']}; stroke-width: 1 }} "
        f"line {{ stroke: {colors['ink']}; stroke-dasharray: 4 3 }}"
    )
