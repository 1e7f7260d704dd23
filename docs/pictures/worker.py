"""The processes and threads of a worker."""

from __future__ import annotations

from canvas import Canvas


def draw() -> Canvas:
    """Services on the left, the supervisor in the middle, its child processes on the right."""
    canvas = Canvas(1000, 560, "The processes and threads of a worker")
    canvas.box(20, 96, 150, 120, "Queues", "and their", "dead letters", style="green")
    canvas.box(20, 268, 150, 64, "Result store", style="green")
    canvas.box(20, 430, 150, 64, "Event files", style="green")
    _supervisor(canvas)
    _children(canvas)
    canvas.arrow((170, 116), (238, 116))
    canvas.arrow((238, 170), (170, 170))
    canvas.arrow((238, 326), (206, 326), (206, 206), (170, 206))
    canvas.arrow((238, 280), (170, 280), both=True)
    canvas.arrow((238, 350), (190, 350), (190, 316), (170, 316))
    canvas.arrow((238, 462), (170, 462))
    for y, label in ((110, "receive"), (164, "renew"), (200, "settle")):
        canvas.text(174, y, label, "small dim")
    canvas.text(
        20, 532, "Task code runs in pool processes alone: nothing it does delays a renewal."
    )
    canvas.text(20, 550, "A lane has threads where the broker or the store is remote.", "small dim")
    return canvas


def _supervisor(canvas: Canvas) -> None:
    canvas.frame(226, 20, 436, 488, "Supervisor process: aztask worker")
    canvas.box(238, 84, 270, 60, "Intake threads", "one a queue, more on Storage", style="plain")
    canvas.box(238, 160, 270, 60, "Lease keeper thread", "renews every lease held", style="blue")
    canvas.box(238, 236, 270, 60, "Claim lane", "owns the start row", style="plain")
    canvas.box(238, 312, 270, 60, "Finish lane", "records, then settles", style="plain")
    canvas.box(238, 432, 270, 60, "Chores, advice, upload", "heartbeats, leases, events")
    canvas.box(540, 84, 106, 408, "The loop", "moves each", "delivery", "from stage", "to stage")
    for y in (114, 190, 266, 342, 462):
        canvas.arrow((508, y), (540, y), both=True)


def _children(canvas: Canvas) -> None:
    canvas.frame(720, 20, 260, 488, "Child processes")
    canvas.box(736, 56, 228, 60, "Fork server", "aztask-fork", style="amber")
    canvas.text(850, 144, "forks", "small dim", "middle")
    canvas.arrow((800, 116), (800, 160))
    canvas.arrow((900, 116), (900, 160))
    for top in (160, 276):
        canvas.box(736, top, 228, 96, "Pool process", "aztask-pool", "main thread: the task")
    canvas.text(850, 396, "... one for each of -c slots", "small dim", "middle")
    canvas.lines(
        736, 432, ("--pool threads:", "one pool process with", "-c threads for tasks"), "small"
    )
    canvas.arrow((646, 86), (736, 86), style="")
    for y in (208, 324):
        canvas.arrow((646, y), (736, y), both=True)
    canvas.text(691, 198, "sockets,", "small dim", "middle")
    canvas.text(691, 226, "board", "small dim", "middle")
