"""The end of a worker on one axis of time, beside the grace period of Kubernetes."""

from __future__ import annotations

from canvas import Canvas

LEFT, SCALE = 210, 12.0
ROWS = (90, 170, 250, 330, 410)


def draw() -> Canvas:
    """Four pool processes under one drain with the default times."""
    canvas = Canvas(1000, 560, "The end of a worker, from SIGTERM to its exit")
    canvas.text(20, 30, "SIGTERM with --shutdown-timeout 30s --shutdown-grace 10s", "title")
    for seconds in range(0, 61, 10):
        canvas.arrow((_x(seconds), 472), (_x(seconds), 478), head=False)
        canvas.text(_x(seconds), 494, f"{seconds} s", "small dim", "middle")
    canvas.arrow((_x(0), 472), (_x(60) + 16, 472))
    for seconds, words in ((0, "context.stopping"), (30, "WorkerStopping"), (40, "killed")):
        canvas.text(_x(seconds), 62, words, "small t-red", "middle")
        canvas.arrow((_x(seconds), 68), (_x(seconds), 440), head=False, style="a-dash")
    _row(canvas, ROWS[0], "An idle process", "ends first")
    _bar(canvas, ROWS[0], 0, 3, "green", "")
    canvas.text(_x(3) + 6, ROWS[0] + 16, "lifespans close", "small t-green")
    _row(canvas, ROWS[1], "A task ends in time", "its outcome is recorded")
    _bar(canvas, ROWS[1], 0, 21, "blue", "runs on")
    _bar(canvas, ROWS[1], 21, 24, "green", "")
    canvas.text(_x(24) + 6, ROWS[1] + 40, "lifespans close", "small t-green", "end")
    _row(canvas, ROWS[2], "A task cleans up", "its message is given back")
    _bar(canvas, ROWS[2], 0, 30, "blue", "runs on")
    _bar(canvas, ROWS[2], 30, 35, "amber", "")
    _bar(canvas, ROWS[2], 35, 38, "green", "")
    canvas.text(_x(32.5), ROWS[2] + 40, "cleans up", "small t-amber", "middle")
    _row(canvas, ROWS[3], "A task does not stop", "its process is killed")
    _bar(canvas, ROWS[3], 0, 30, "blue", "runs on")
    _bar(canvas, ROWS[3], 30, 40, "amber", "")
    canvas.cross(_x(40), ROWS[3] + 11)
    canvas.text(_x(40) + 12, ROWS[3] + 16, "given back", "small t-red")
    _row(canvas, ROWS[4], "The worker", "at the latest")
    _bar(canvas, ROWS[4], 0, 40, "plain", "waits for its tasks")
    _bar(canvas, ROWS[4], 40, 50, "green", "lifespans")
    canvas.text(_x(50) + 8, ROWS[4] + 16, "exit 0", "small")
    canvas.text(
        20, 530, "Kubernetes sends SIGKILL at the end of terminationGracePeriodSeconds:", "bold"
    )
    canvas.text(20, 548, "--shutdown-timeout + 2 x --shutdown-grace + 10 s, here 60.", "small dim")
    return canvas


def _x(seconds: float) -> float:
    return LEFT + seconds * SCALE


def _row(canvas: Canvas, top: int, name: str, what: str) -> None:
    canvas.text(20, top + 10, name, "bold")
    canvas.text(20, top + 28, what, "small dim")


def _bar(canvas: Canvas, top: int, start: float, end: float, style: str, words: str) -> None:
    canvas.bar(_x(start), top, (end - start) * SCALE, 22, style)
    if words:
        canvas.text(_x((start + end) / 2), top + 16, words, "small", "middle")
