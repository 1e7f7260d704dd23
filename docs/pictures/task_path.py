"""A task's path, from ``.delay()`` to its result, as a sequence of steps."""

from __future__ import annotations

from canvas import Canvas

LANES = (
    (110, "Your program", "App, Sender"),
    (320, "Queue", "Broker"),
    (540, "Worker", "Supervisor, Pipeline"),
    (730, "Pool process", "Runner"),
    (908, "Result store", "ResultStore"),
)
PROGRAM, QUEUE, WORKER, POOL, STORE = (x for x, _, _ in LANES)
STEPS = (
    (PROGRAM, QUEUE, "1  send the message", ""),
    (PROGRAM, STORE, "2  expect it, if the task id is yours", ""),
    (QUEUE, WORKER, "3  deliver, under a lease", ""),
    (WORKER, STORE, "4  own the start row", "blue"),
    (WORKER, POOL, "5  arguments", ""),
    (WORKER, QUEUE, "6  renew, again and again", "blue"),
    (POOL, WORKER, "7  value or error", ""),
    (WORKER, STORE, "8  record outcome and settlement", "green"),
    (WORKER, QUEUE, "9  settle", "green"),
    (STORE, PROGRAM, "10  result.get()", ""),
)


def draw() -> Canvas:
    """A line of life for each part, an arrow for each step."""
    canvas = Canvas(1000, 640, "A task's path from delay to settlement")
    for x, name, what in LANES:
        canvas.box(x - 78, 20, 156, 54, name, what, style="plain" if x != QUEUE else "green")
        canvas.arrow((x, 74), (x, 612), style="a-dash", head=False)
    for number, (start, end, label, style) in enumerate(STEPS):
        y = 116 + number * 52
        canvas.arrow((start, y), (end, y), style=f"a-{style}" if style else "")
        canvas.text(
            (start + end) / 2,
            y - 8,
            label,
            f"small halo t-{style}" if style else "small halo",
            "middle",
        )
    canvas.cross(POOL, 116 + 5.45 * 52)
    canvas.lines(
        POOL + 14, 116 + 5.3 * 52, ("dies here: a failed", "run, which is retried"), "small t-red"
    )
    canvas.cross(WORKER, 116 + 7.5 * 52)
    canvas.lines(
        WORKER + 14, 116 + 7.42 * 52, ("dies here: not run again,", "the settlement is repeated"),
        "small t-red",
    )  # fmt: skip
    return canvas
