"""A workflow as a drawing: boxes in columns, joined by lines, as SVG without styles or scripts.

A chain runs from left to right, the members of a group lie below each other. Of a large group the
first members are drawn, those that did not succeed first.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Final

from markupsafe import Markup, escape

from aztask.operate.workflows import NodeView, WorkflowView, members_first_failed
from aztask.support.display import mask, visible

WIDTH, HEIGHT = 168, 40
GAP_X, GAP_Y = 36, 14
MOST_MEMBERS: Final = 12
MOST_BOXES: Final = 300
LETTERS: Final = 22


@dataclass(slots=True)
class Drawing:
    """Boxes and lines, as they were added, and how far they reach."""

    parts: list[Markup] = field(default_factory=list)
    right: int = 0
    bottom: int = 0
    boxes: int = 0

    def chain(self, nodes: Iterable[NodeView], x: int, y: int) -> tuple[int, int, int]:
        """Draw nodes from left to right. Returns (right end, lower end, y of the last line)."""
        low, line = y + HEIGHT, y + HEIGHT // 2
        before: int | None = None
        for node in nodes:
            if before is not None:
                self._line(before, line, x, line)
            if node.task:
                self._box(node.task, _state(node), x, y)
                before, x = x + WIDTH, x + WIDTH + GAP_X
            else:
                end, lower = self._group(node, x, y)
                low = max(low, lower)
                before, x = end, end + GAP_X
        return (before or x), low, line

    def _group(self, node: NodeView, x: int, y: int) -> tuple[int, int]:
        """Draw the members of a group below each other; returns its right and its lower end."""
        members = members_first_failed(node)
        inner, at, ends = x + GAP_X, y, []
        middle = y + HEIGHT // 2
        for member in members[:MOST_MEMBERS]:
            if self.boxes >= MOST_BOXES:
                break
            self._line(x, middle, inner, at + HEIGHT // 2)
            end, low, line = self.chain(member, inner, at)
            ends.append((end, line))
            at = low + GAP_Y
        more = len(members) - len(ends)
        if more > 0:
            self._note(f"and {more:,} more", inner, at + 14)
            at += 24 + GAP_Y
        right = max((end for end, _ in ends), default=inner) + GAP_X
        for end, line in ends:
            self._line(end, line, right, middle)
        return right, at - GAP_Y

    def _box(self, task: str, state: str, x: int, y: int) -> None:
        self.boxes += 1
        name = visible(mask(task))
        short = name if len(name) <= LETTERS else f"…{name[1 - LETTERS :]}"
        self.parts.append(
            Markup(
                '<g class="node {}"><title>{}: {}</title>'
                '<rect x="{}" y="{}" width="{}" height="{}" rx="5"/>'
                '<text x="{}" y="{}">{}</text><text class="state" x="{}" y="{}">{}</text></g>'
            ).format(
                *(state, name, state, x, y, WIDTH, HEIGHT),
                *(x + 8, y + 17, short, x + 8, y + 32, state),
            )
        )
        self._reach(x + WIDTH, y + HEIGHT)

    def _line(self, x: int, y: int, to_x: int, to_y: int) -> None:
        half = (x + to_x) // 2
        path = f"M{x} {y}C{half} {y} {half} {to_y} {to_x} {to_y}"
        self.parts.append(Markup('<path class="edge" d="{}"/>').format(path))
        self._reach(to_x, to_y)

    def _note(self, text: str, x: int, y: int) -> None:
        self.parts.append(Markup('<text class="note" x="{}" y="{}">{}</text>').format(x, y, text))
        self._reach(x + 100, y + 10)

    def _reach(self, x: int, y: int) -> None:
        self.right, self.bottom = max(self.right, x), max(self.bottom, y)


def _state(node: NodeView) -> str:
    return node.state.value if node.state is not None else "waiting"


def drawn(view: WorkflowView) -> Markup:
    """The graph of a workflow as ``<svg>``, with its states as words in it."""
    drawing = Drawing()
    drawing.chain(view.nodes, 1, 1)
    label = escape(f"Graph of the workflow: {view.root.tasks} tasks")
    width, height = drawing.right + 2, drawing.bottom + 2
    head = Markup(
        '<svg class="graph" role="img" aria-label="{}" width="{}" height="{}" viewBox="0 0 {} {}">'
    ).format(label, width, height, width, height)
    return head + Markup("").join(drawing.parts) + Markup("</svg>")
