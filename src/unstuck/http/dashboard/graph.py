"""Lay a workflow out as a drawing: layers from left to right, groups as boxes, maps and bundles as one. Pure."""

from collections.abc import Sequence
from dataclasses import dataclass, field

from unstuck.client.workflows.outline import Item, Outline, counted
from unstuck.client.workflows.text import summary
from unstuck.domain.units import brief

WIDTH = 196
HEIGHT = 58
BETWEEN_LAYERS = 52
BETWEEN = 16
PADDING = 14
HEAD = 30
MARGIN = 8
TITLE_CHARS = 22
BUNDLE = 8
"""More alike than that, side by side, are drawn as one."""
MAX_BOXES = 300
"""Beyond that a drawing tells nobody anything; the list below it does."""
BAR = 172
"""Width of the bar that shows how many of many are in which state."""

MARKS = {
    "succeeded": "✓",
    "running": "▶",
    "claimed": "◐",
    "pending": "◷",
    "released": "◷",
    "waiting": "…",
    "paused": "‖",
    "failed": "✕",
    "quarantined": "!",
    "cancelled": "⊘",
}
"""A shape for each state: colour alone tells not everybody."""


@dataclass
class Box:
    """One node, or many that are drawn as one."""

    key: str
    kind: str
    title: str
    state: str
    places: tuple[int, ...]
    layer: int
    after: tuple[int, ...]
    job_id: int | None = None
    line: str = ""
    bars: list[tuple[str, float, float]] = field(default_factory=list)
    """State, where it begins, how wide it is."""
    inside: "list[Box]" = field(default_factory=list)
    edges: "list[Edge]" = field(default_factory=list)
    x: float = 0.0
    y: float = 0.0
    width: float = WIDTH
    height: float = HEIGHT

    @property
    def short(self) -> str:
        return self.title if len(self.title) <= TITLE_CHARS else f"{self.title[: TITLE_CHARS - 1]}…"

    @property
    def mark(self) -> str:
        return MARKS.get(self.state, "?")


@dataclass(frozen=True)
class Edge:
    key: str
    path: str
    done: bool


@dataclass(frozen=True)
class Drawing:
    boxes: list[Box]
    edges: list[Edge]
    width: float
    height: float


def draw(whole: Outline, now_s: float) -> Drawing | None:
    """Give the drawing, or None where there would be too much of it."""
    boxes = [_box(item, now_s) for item in _bundled(whole.items)]
    if _count(boxes) > MAX_BOXES:
        return None
    width, height = _arrange(boxes, MARGIN, MARGIN)
    return Drawing(boxes, _edges(boxes), width + MARGIN, height + MARGIN)


def _count(boxes: Sequence[Box]) -> int:
    return sum(1 + _count(box.inside) for box in boxes)


def _bundled(items: Sequence[Item]) -> list[list[Item]]:
    """Put tasks together that are alike and stand side by side: same task, same before, same after."""
    later: dict[int, set[int]] = {}
    for item in items:
        for place in item.after:
            later.setdefault(place, set()).add(item.node.place)
    alike: dict[tuple[object, ...], list[Item]] = {}
    for item in items:
        key: tuple[object, ...] = (item.node.place,)
        if item.node.kind == "task":
            key = (item.node.task, item.after, tuple(sorted(later.get(item.node.place, ()))), "alike")
        alike.setdefault(key, []).append(item)
    found = []
    for group in alike.values():
        found += [group] if len(group) > BUNDLE else [[item] for item in group]
    return found


def _box(items: list[Item], now_s: float) -> Box:
    if len(items) > 1:
        return _bundle(items)
    [item] = items
    node = item.node
    box = Box(f"n{node.place}", node.kind, node.name, item.state, (node.place,), item.layer, item.after, node.job_id)
    if node.kind == "group":
        box.inside = [_box(one, now_s) for one in _bundled(item.inside)]
        box.line = summary(item.counts)
    elif node.kind == "map":
        _sum_up(box, item.counts, "map")
    else:
        box.line = _line(item, now_s)
    return box


def _bundle(items: list[Item]) -> Box:
    first = items[0]
    counts = counted(items)
    worst = next((state for state in ("failed", "quarantined", "paused", "running") if state in counts), first.state)
    places = tuple(item.node.place for item in items)
    title = f"{len(items):,} × {first.node.task or first.node.name}"
    box = Box(f"n{places[0]}", "bundle", title, worst, places, first.layer, first.after)
    _sum_up(box, counts, "bundle")
    return box


def _sum_up(box: Box, counts: dict[str, int], kind: str) -> None:
    total = sum(counts.values())
    box.line = f"{counts.get('succeeded', 0):,} of {total:,}" if total else kind
    at = 0.0
    for state, number in counts.items():
        width = BAR * number / total
        box.bars.append((state, round(at, 1), round(width, 1)))
        at += width


def _line(item: Item, now_s: float) -> str:
    node = item.node
    parts = [] if node.job_id is None else [f"#{node.job_id}"]
    ended = node.finished_at if item.state != "running" else now_s
    if item.started_at is not None and ended is not None:
        parts.append(brief(max(0.0, ended - item.started_at)))
    return " · ".join([*parts, *([] if parts else [item.state])])


def _arrange(boxes: Sequence[Box], x: float, y: float) -> tuple[float, float]:
    """Put boxes into their layers, from this corner on; give how far they reach."""
    layers: dict[int, list[Box]] = {}
    for box in boxes:
        if box.inside:
            reach_x, reach_y = _arrange(box.inside, PADDING, HEAD + PADDING)
            box.width, box.height = reach_x + PADDING, reach_y + PADDING
            box.edges = _edges(box.inside)
        layers.setdefault(box.layer, []).append(box)
    tall = max((_tall(layer) for layer in layers.values()), default=0.0)
    right = x
    for at in sorted(layers):
        layer = layers[at]
        top = y + (tall - _tall(layer)) / 2
        for box in layer:
            box.x, box.y = right, round(top, 1)
            top += box.height + BETWEEN
        right += max(box.width for box in layer) + BETWEEN_LAYERS
    return right - BETWEEN_LAYERS, y + tall


def _tall(boxes: Sequence[Box]) -> float:
    return sum(box.height for box in boxes) + BETWEEN * (len(boxes) - 1)


def _edges(boxes: Sequence[Box]) -> list[Edge]:
    owners = {place: box.key for box in boxes for place in box.places}
    known = {box.key: box for box in boxes}
    direct = {box.key: {owners[place] for place in box.after if place in owners} for box in boxes}
    edges = []
    for box in boxes:
        for source in sorted(_needed(box.key, direct), key=lambda key: known[key].places):
            before = known[source]
            from_x, from_y = before.x + before.width, before.y + before.height / 2
            to_x, to_y = box.x, box.y + box.height / 2
            bend = max(24.0, (to_x - from_x) / 2)
            path = f"M{from_x:g} {from_y:g}C{from_x + bend:g} {from_y:g} {to_x - bend:g} {to_y:g} {to_x - 5:g} {to_y:g}"
            edges.append(Edge(f"{before.key}-{box.key}", path, before.state == "succeeded"))
    return edges


def _needed(key: str, direct: dict[str, set[str]]) -> set[str]:
    """Leave out what goes without saying: who waits for B, which waits for A, waits for A too."""
    implied: set[str] = set()
    open_ = [earlier for source in direct[key] for earlier in direct[source]]
    while open_:
        at = open_.pop()
        if at not in implied:
            implied.add(at)
            open_ += direct[at]
    return direct[key] - implied
