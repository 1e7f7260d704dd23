"""Each instant of a workflow at which a process may die, and what follows."""

from __future__ import annotations

from typing import NamedTuple

from canvas import Canvas

WIDTH, BOX, GAP = 500, 34, 62


class Panel(NamedTuple):
    """Steps one below the other. `deaths`: what follows a death after each step, in lines."""

    title: str
    what: str
    steps: tuple[str, ...]
    deaths: tuple[tuple[str, ...], ...]


PANELS = (
    Panel(
        "A sender starts a workflow",
        "nothing that was committed is lost",
        (
            "announce it in the index",
            "store plan and messages",
            "store the root: it commits",
            "send the first tasks",
            "note that they are sent",
        ),
        (
            ("nothing has started; housekeeping", "deletes the entry after 10 minutes"),
            ("nothing has started; housekeeping", "deletes the parts after 10 minutes"),
            ("30 s later any worker", "sends them"),
            ("30 s later they are sent again,", "under the same ids"),
        ),
    ),
    Panel(
        "A member of a chord ends",
        "its message is settled last",
        (
            "record the outcome",
            "set its bit",
            "row full: store its values",
            "note the row; all full: decide",
            "send the body",
            "settle the message",
        ),
        (
            ("redelivered: the outcome is there,", "so it is not run; the bit is set"),
            ("redelivered: the full row is found,", "and its values are stored"),
            ("redelivered: the values are stored", "already, the row is noted"),
            ("redelivered: the decision is found,", "the body is sent if it is unknown"),
            ("redelivered: nothing is left to do", "but to settle"),
        ),
    ),
    Panel(
        "Workers meet at a row in Azure Tables",
        "in place of \u201cset its bit\u201d",
        (
            "append the bit, no condition",
            "read the row with all bits",
            "all bits are there: decide",
            "send the body",
        ),
        (
            ("the bit is set; the redelivery,", "or housekeeping, reads the row"),
            ("full and undecided: the redelivery,", "or housekeeping, decides"),
            ("redelivered: the decision is found,", "the body is sent if it is unknown"),
        ),
    ),
    Panel(
        "A member that is a unique task",
        "the key is held by id and generation",
        (
            "take the key",
            "own the start row",
            "run, or adopt an outcome",
            "record it, set the bit",
            "free the key",
            "settle the message",
        ),
        (
            ("redelivered: it finds that", "it holds the key"),
            ("redelivered: it takes over", "the start row"),
            ("nothing is recorded: it runs,", "or adopts, again"),
            ("the end is recorded: the key", "counts as free"),
            ("redelivered: only the", "settlement is repeated"),
        ),
    ),
)


def draw() -> Canvas:
    """Two panels above two others."""
    heights = [max(_height(panel) for panel in PANELS[row : row + 2]) for row in (0, 2)]
    canvas = Canvas(2 * WIDTH, sum(heights) + 20, "Where processes may die in a workflow")
    for number, panel in enumerate(PANELS):
        row, column = divmod(number, 2)
        _panel(canvas, panel, column * WIDTH + 20, 20 + sum(heights[:row]))
    return canvas


def _height(panel: Panel) -> int:
    return 70 + GAP * (len(panel.steps) - 1) + BOX + 30


def _panel(canvas: Canvas, panel: Panel, x: int, top: int) -> None:
    canvas.text(x, top + 14, panel.title, "title")
    canvas.text(x, top + 34, panel.what, "small dim")
    for number, step in enumerate(panel.steps):
        y = top + 50 + GAP * number
        last = number == len(panel.steps) - 1
        canvas.box(x, y, 220, BOX, step, style="green" if last else "plain")
        if last:
            continue
        middle = y + BOX + (GAP - BOX) / 2
        canvas.arrow((x + 40, y + BOX), (x + 40, y + GAP))
        canvas.cross(x + 40, middle)
        canvas.arrow((x + 52, middle), (x + 228, middle), style="a-red a-dash", head=False)
        canvas.lines(x + 234, middle - 4, panel.deaths[number], "small t-red")
