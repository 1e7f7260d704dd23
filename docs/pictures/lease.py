"""The life of a lease of 60 seconds, in four fates, and its states."""

from __future__ import annotations

from canvas import Canvas

LEFT, SCALE = 190, 6.0
ROWS = (80, 180, 280, 380)


def draw() -> Canvas:
    """Four lives on one axis of time, then the states."""
    canvas = Canvas(1000, 720, "The life of a lease")
    canvas.text(20, 30, "A lease of 60 s, renewed at 70 % of it", "title")
    for seconds in range(0, 131, 10):
        canvas.arrow((_x(seconds), 462), (_x(seconds), 468), head=False)
        if seconds % 20 == 0:
            canvas.text(_x(seconds), 484, f"{seconds} s", "small dim", "middle")
    canvas.arrow((_x(0), 462), (_x(130) + 16, 462))
    _renewed(canvas, ROWS[0])
    _dies(canvas, ROWS[1])
    _cut_off(canvas, ROWS[2])
    _limited(canvas, ROWS[3])
    _states(canvas)
    return canvas


def _x(seconds: float) -> float:
    return LEFT + seconds * SCALE


def _bar(canvas: Canvas, top: int, start: float, end: float, style: str = "blue") -> None:
    canvas.bar(_x(start), top, (end - start) * SCALE, 22, style)


def _row(canvas: Canvas, top: int, *lines: str) -> None:
    canvas.text(20, top + 10, lines[0], "bold")
    canvas.lines(20, top + 28, lines[1:], "small dim")


def _renewed(canvas: Canvas, top: int) -> None:
    _row(canvas, top, "The task ends", "renewed until then")
    _bar(canvas, top, 0, 110)
    for at in (42, 84):
        canvas.arrow((_x(at), top + 44), (_x(at), top + 24), style="a-blue")
        canvas.text(_x(at), top + 58, f"renewed: until {at + 60} s", "small t-blue", "middle")
        canvas.bar(_x(at - 12), top, 12 * SCALE, 22, "amber")
    canvas.text(_x(110) + 6, top + 16, "settled", "small t-green")
    canvas.text(_x(36), top - 8, "from 50 %: goes along in a batch", "small t-amber", "middle")


def _dies(canvas: Canvas, top: int) -> None:
    _row(canvas, top, "The worker dies", "nothing has to", "notice it")
    _bar(canvas, top, 0, 20)
    canvas.cross(_x(20), top + 11)
    _bar(canvas, top, 21.5, 60, "frame")
    _bar(canvas, top, 60, 100, "green")
    canvas.text(_x(41), top + 16, "waits, still leased", "small dim", "middle")
    canvas.text(_x(80), top + 16, "another worker runs it", "small t-green", "middle")
    canvas.text(_x(60), top + 42, "the lease lapses at 60 s", "small", "middle")


def _cut_off(canvas: Canvas, top: int) -> None:
    _row(canvas, top, "The worker is cut off", "or the broker is", "unreachable")
    _bar(canvas, top, 0, 58)
    _bar(canvas, top, 58, 60, "red")
    _bar(canvas, top, 60, 100, "green")
    for at in (42, 47, 52):
        canvas.cross(_x(at), top + 32, 4)
    canvas.text(_x(39), top + 38, "renewals fail, are repeated", "small t-red", "end")
    canvas.text(_x(80), top + 16, "another worker runs it", "small t-green", "middle")
    canvas.text(_x(58), top - 6, "58 s: the task is told to stop", "small t-red", "end")
    canvas.text(_x(60), top - 6, "60 s: lost. Nothing is settled or recorded", "small")


def _limited(canvas: Canvas, top: int) -> None:
    _row(canvas, top, "max_lease is used up", "here 100 s, counted", "from the start")
    _bar(canvas, top, 0, 98)
    _bar(canvas, top, 98, 100, "red")
    canvas.text(_x(42), top + 42, "renewed", "small t-blue", "middle")
    canvas.text(_x(84), top + 42, "shortened to end at 100 s", "small t-blue", "middle")
    canvas.text(
        _x(98), top - 6, "the task is told to stop, then its process ends", "small t-red", "end"
    )
    for at in (42, 84):
        canvas.arrow((_x(at), top + 30), (_x(at), top + 24), head=False, style="a-blue")
    canvas.text(_x(100) + 8, top + 16, "the message is", "small")
    canvas.text(_x(100) + 8, top + 33, "available again", "small")


def _states(canvas: Canvas) -> None:
    top = 560
    canvas.text(20, 526, "Its states", "title")
    canvas.box(60, top, 130, 50, "held", style="blue")
    canvas.box(330, top, 130, 50, "renewing", style="blue")
    canvas.box(600, top, 130, 50, "unknown", style="amber")
    canvas.box(60, top + 96, 130, 50, "settling", style="blue")
    canvas.box(330, top + 96, 130, 50, "settled", style="green")
    canvas.box(840, top + 48, 130, 50, "lost", style="red")
    canvas.arrow((190, top + 15), (330, top + 15))
    canvas.arrow((330, top + 37), (190, top + 37))
    canvas.text(260, top + 8, "it is due", "small dim", "middle")
    canvas.text(260, top + 52, "granted, or no answer", "small dim", "middle")
    canvas.arrow((460, top + 25), (600, top + 25))
    canvas.text(530, top + 2, "answer lost, token", "small dim", "middle")
    canvas.text(530, top + 17, "changed (Storage)", "small dim", "middle")
    canvas.arrow((110, top + 50), (110, top + 96))
    canvas.arrow((140, top + 96), (140, top + 50))
    canvas.text(102, top + 78, "settle", "small dim", "end")
    canvas.text(150, top + 78, "failed: again", "small dim")
    canvas.arrow((190, top + 121), (330, top + 121))
    canvas.text(260, top + 113, "confirmed", "small dim", "middle")
    canvas.arrow((730, top + 25), (800, top + 25), (840, top + 60))
    canvas.text(670, top + 88, "held, renewing, settling: the deadline", "small dim", "middle")
    canvas.text(670, top + 105, "passed, or the broker said so", "small dim", "middle")
    canvas.arrow((800, top + 84), (840, top + 84))
