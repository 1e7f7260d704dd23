"""The delivery pipeline, and what becomes of the task when the worker dies after each step."""

from __future__ import annotations

from canvas import Canvas

STEPS: tuple[tuple[str, str, tuple[str, ...]], ...] = (
    (
        "Receive",
        "the broker grants a lease",
        ("Nothing ran. The lease lapses, another worker runs it.",),
    ),
    ("Open", "signature, headers, task", ()),
    (
        "Claim",
        "own the start row",
        (
            "Nothing ran. The next delivery takes the start row over;",
            "the start counts against max_deliveries.",
        ),
    ),
    (
        "Run",
        "in a pool process, lease renewed",
        (
            "The task may have run, fully or in part. It runs again:",
            "use checkpoints, and the fence context.lease.ensure().",
        ),
    ),
    (
        "Decide",
        "complete, retry or dead-letter",
        ("The task has run, nothing says so yet. It runs again.",),
    ),
    (
        "Record",
        "outcome and settlement",
        (
            "Recorded: the next delivery does not run the task, it repeats",
            "the settlement. Where store and broker share a file, both are one",
            "transaction: nothing was recorded, and the task runs again.",
        ),
    ),
    (
        "Settle",
        "complete, resubmit, dead-letter",
        ("Done. At most the last lines of events are missing.",),
    ),
)
"""Each step: its name, what it does, and what follows when the worker dies after it."""
TOP, STEP = 84, 92


def draw() -> Canvas:
    """The steps from top to bottom, the crash windows beside them."""
    canvas = Canvas(980, 760, "The delivery pipeline and its crash windows")
    canvas.text(30, 36, "A delivery's way through a worker", "title")
    canvas.text(480, 36, "If the worker dies here", "title")
    canvas.text(30, 58, "Each step takes whole batches.", "small dim")
    canvas.text(480, 58, "With a result store. The lease lapses by itself.", "small dim")
    for number, (name, what, crash) in enumerate(STEPS):
        top = TOP + number * STEP
        style = {"Run": "amber", "Record": "green", "Settle": "green"}.get(name, "blue")
        canvas.box(30, top, 300, 58, name, what, style=style)
        if number < len(STEPS) - 1:
            canvas.arrow((180, top + 58), (180, top + STEP))
        if crash:
            middle = top + 75
            canvas.cross(380, middle)
            canvas.arrow((190, middle), (370, middle), style="a-red a-dash", head=False)
            canvas.arrow((392, middle), (470, middle), style="a-red a-dash")
            canvas.lines(480, middle + 4.5 - 8.5 * (len(crash) - 1), crash)
    return canvas
