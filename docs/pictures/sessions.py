"""Sessions: one queue, many orders, one receiver for each."""

from __future__ import annotations

from canvas import Canvas

QUEUE = ("A1", "B1", "A2", "C1", "A3", "B2", "C2", "A4")
STYLE = {"A": "blue", "B": "green", "C": "amber"}
NAMES = {"A": "alice", "B": "bob", "C": "carol"}


def draw() -> Canvas:
    """The queue at the top, the sessions over time below."""
    canvas = Canvas(1000, 470, "Sessions: messages in order, one at a time")
    canvas.text(20, 34, "The queue, in the order of sending", "title")
    for number, name in enumerate(QUEUE):
        canvas.box(20 + number * 62, 52, 54, 38, name, style=STYLE[name[0]])
    canvas.text(530, 76, "A, B, C: sessions alice, bob, carol", "small dim")
    canvas.text(
        20, 136, "What workers do with it: each session has one lease, so one worker", "title"
    )
    _lane(
        canvas,
        168,
        "A",
        "worker 1",
        ((0, "A1", 90), (94, "A2", 70), (330, "A2", 70), (404, "A3", 80), (488, "A4", 80)),
    )
    _lane(canvas, 258, "B", "worker 2", ((0, "B1", 200), (204, "B2", 120)))
    _lane(
        canvas, 348, "C", "worker 3, then 2", ((40, "C1", 80), (300, "C1", 110), (414, "C2", 120))
    )
    canvas.cross(377, 194)
    canvas.text(392, 184, "fails: the session", "small t-red")
    canvas.text(392, 212, "waits for its retry", "small t-red")
    canvas.cross(326, 374)
    canvas.text(340, 364, "worker 3 dies: the", "small t-red")
    canvas.text(340, 392, "session's lease lapses", "small t-red")
    canvas.arrow((200, 430), (960, 430))
    canvas.text(960, 450, "time", "small dim", "end")
    canvas.text(
        200, 450, "Sessions run side by side. Within one, no message overtakes another.", "small"
    )
    return canvas


def _lane(
    canvas: Canvas, top: int, session: str, worker: str, runs: tuple[tuple[int, str, int], ...]
) -> None:
    canvas.text(20, top + 22, NAMES[session], "bold")
    canvas.text(20, top + 40, worker, "small dim")
    canvas.arrow((200, top + 26), (950, top + 26), style="a-dash", head=False)
    for left, name, width in runs:
        canvas.box(200 + left, top + 6, width, 40, name, style=STYLE[session])
