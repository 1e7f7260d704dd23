"""The data pipeline: tables become tasks, events become reports and advice."""

from __future__ import annotations

from canvas import Canvas


def draw() -> Canvas:
    """Spark above, the queue and its workers below."""
    canvas = Canvas(1000, 560, "The data pipeline on Spark")
    canvas.frame(20, 20, 960, 190, "Spark: on a laptop, or on a cluster")
    canvas.frame(20, 330, 960, 190, "The task system")
    canvas.box(44, 60, 150, 64, "A table", "or a stream", style="amber")
    canvas.box(264, 60, 150, 64, "submit", "stream", style="blue")
    canvas.box(484, 60, 150, 64, "dlq", "group, replay", style="blue")
    canvas.box(
        704, 60, 250, 64, "stats, recommend, compact", "reports over all events", style="blue"
    )
    canvas.text(339, 150, "one task for each row,", "small dim", "middle")
    canvas.text(339, 167, "ids made of the rows' keys", "small dim", "middle")
    canvas.text(829, 150, "each event once, sorted", "small dim", "middle")
    canvas.text(829, 167, "by task and queue", "small dim", "middle")
    canvas.box(264, 400, 150, 84, "Queue", style="green")
    canvas.box(484, 400, 150, 84, "Dead letters", style="green")
    canvas.box(44, 400, 150, 84, "Workers", "run the tasks")
    canvas.box(704, 400, 250, 84, "Event files", "a directory, or a container", style="green")
    canvas.arrow((194, 92), (264, 92))
    canvas.arrow((310, 124), (310, 134), head=False)
    canvas.arrow((310, 178), (310, 400))
    canvas.text(300, 260, "sends", "small", "end")
    canvas.arrow((264, 425), (194, 425))
    canvas.text(229, 417, "lease", "small dim", "middle")
    canvas.arrow((414, 440), (484, 440))
    canvas.text(449, 430, "fails", "small dim", "middle")
    canvas.arrow((559, 400), (559, 124))
    canvas.text(569, 260, "reads", "small")
    canvas.arrow((520, 124), (520, 300), (380, 300), (380, 400))
    canvas.text(450, 290, "replays", "small", "middle")
    canvas.arrow((119, 484), (119, 504), (829, 504), (829, 484))
    canvas.text(654, 498, "write events", "small", "end")
    canvas.arrow((860, 400), (860, 178))
    canvas.text(870, 260, "reads", "small")
    canvas.arrow((715, 124), (715, 236), (184, 236), (184, 400), style="a-dash")
    canvas.text(194, 228, "lease advice", "small")
    canvas.text(
        20, 546, "Nothing here needs Spark but the upper frame: workers write events without it."
    )
    return canvas
