"""Draws a tree of text, one line for each node; long lists of members are abbreviated."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Final, Protocol, TypeAlias

SHOWN: Final = 4
"""Members of a group that are drawn; of more, the first ones and the last one."""


class Drawable(Protocol):
    """A node of a tree."""

    def drawn(self) -> Drawing:
        """The node's title, and its parts, each with a label."""
        ...


Part: TypeAlias = tuple[str, Drawable | None]
Drawing: TypeAlias = tuple[str, Sequence[Part]]


def draw(root: Drawable) -> str:
    """The tree below `root`, without a line break at the end."""
    title, parts = root.drawn()
    return "\n".join([title, *_branches(parts)])


def abbreviated(members: Sequence[Drawable]) -> list[Part]:
    """The members as parts; of many, only some."""
    parts: list[Part] = [("", each) for each in members]
    if len(parts) > SHOWN:
        hidden = len(parts) - SHOWN
        parts = [*parts[: SHOWN - 1], (f"... {hidden:,} more", None), parts[-1]]
    return parts


def _branches(parts: Sequence[Part]) -> Iterator[str]:
    for number, (label, node) in enumerate(parts, 1):
        last = number == len(parts)
        title, inner = node.drawn() if node is not None else ("", ())
        yield f"{'└ ' if last else '├ '}{label}{title}"
        for line in _branches(inner):
            yield f"{'  ' if last else '│ '}{line}"
