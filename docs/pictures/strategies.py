"""The five retry strategies: what waits, where, and for how long."""

from __future__ import annotations

from canvas import Canvas

LEFT = 170
DUE, LAPSE = 560, 430
ROWS = (
    ("resubmit", "the default"),
    ("abandon", "at once"),
    ("lease-timeout", "costs nothing"),
    ("hold", "keeps its place"),
    ("defer", "keeps its number"),
)


def draw() -> Canvas:
    """One row for each strategy, on one axis of time."""
    canvas = Canvas(1000, 560, "The retry strategies side by side")
    canvas.text(20, 34, "A run fails. How does the message wait for its retry?", "title")
    for x, label in ((LAPSE, "the lease ends"), (DUE, "the retry is due")):
        canvas.text(x, 68, label, "small dim", "middle")
        canvas.arrow((x, 76), (x, 490), style="a-dash", head=False)
    canvas.text(300, 68, "the run fails", "small dim", "middle")
    canvas.arrow((300, 76), (300, 490), style="a-dash a-red", head=False)
    for number, (name, note) in enumerate(ROWS):
        top = 92 + number * 80
        canvas.text(20, top + 18, name, "bold")
        canvas.text(20, top + 36, note, "small dim")
        canvas.box(LEFT, top, 128, 44, "run 1", style="red")
        _WAITS[name](canvas, top)
    _legend(canvas, 530)
    return canvas


def _wait(canvas: Canvas, top: int, left: int, right: int, text: str, style: str) -> None:
    canvas.bar(left, top + 8, right - left, 28, style)
    canvas.text((left + right) / 2, top + 26, text, "small", "middle")


def _again(canvas: Canvas, top: int, left: int, *lines: str) -> None:
    canvas.box(left, top, 128, 44, "run 2", style="green")
    canvas.lines(left + 140, top + 19, lines, "small halo")


def _resubmit(canvas: Canvas, top: int) -> None:
    _wait(canvas, top, 303, DUE - 2, "a clone, scheduled in the queue", "hollow")
    _again(canvas, top, DUE, "a new message, at the", "end of the queue")


def _abandon(canvas: Canvas, top: int) -> None:
    _again(canvas, top, 306, "any worker, no delay")


def _lapse(canvas: Canvas, top: int) -> None:
    _wait(canvas, top, 303, LAPSE - 2, "still leased", "plain")
    _again(canvas, top, LAPSE + 2, "the same message; the delay is", "what is left of the lease")


def _hold(canvas: Canvas, top: int) -> None:
    _wait(canvas, top, 303, DUE - 2, "leased by this worker, renewed", "blue")
    _again(canvas, top, DUE, "the same message; nothing", "overtakes it in its session")


def _defer(canvas: Canvas, top: int) -> None:
    canvas.bar(303, top - 4, DUE - 305, 24, "hollow")
    canvas.text((303 + DUE) / 2, top + 12, "a pointer, scheduled", "small", "middle")
    canvas.bar(303, top + 26, DUE - 305, 24, "amber")
    canvas.text((303 + DUE) / 2, top + 42, "the message, set aside", "small", "middle")
    _again(canvas, top, DUE, "the same message, called", "for by its pointer")


_WAITS = {
    "resubmit": _resubmit,
    "abandon": _abandon,
    "lease-timeout": _lapse,
    "hold": _hold,
    "defer": _defer,
}


def _legend(canvas: Canvas, y: int) -> None:
    entries = (
        (20, "hollow", "a second message"),
        (220, "plain", "leased, not renewed"),
        (450, "blue", "leased and renewed"),
        (680, "amber", "deferred in the queue"),
    )
    for x, style, text in entries:
        canvas.bar(x, y - 12, 26, 16, style)
        canvas.text(x + 34, y, text, "small")
