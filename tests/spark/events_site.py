"""Event logs for the tests: files of many workers, with all kinds of events."""

from __future__ import annotations

import random
import shutil
from pathlib import Path

from pyspark.sql import functions as F

from aztask.spark.events.lines import DDL
from aztask.stores.events.event import Event, quote, to_line

BEGIN = 1_790_000_000 // 3600 * 3600
HOURS = 3


def random_event(draw: random.Random, number: int) -> Event:
    """One event of any kind, with the fields that a worker gives that kind."""
    kind = draw.choices(
        ["enqueued", "received", "started", "succeeded", "resubmitted", "failed", "dead_lettered",
         "lease_lost", "settle_failed", "renewed", "snoozed", "waiting", "expired", "cancelled"],
        [20, 20, 20, 18, 4, 2, 2, 3, 2, 5, 2, 2, 1, 1],
    )[0]  # fmt: skip
    ran = kind in ("succeeded", "resubmitted", "failed", "snoozed", "waiting")
    ended = ran or kind in ("expired", "cancelled")
    told = ended or kind in ("lease_lost", "settle_failed")
    lease = draw.choice([30.0, 60.0])
    return Event(
        kind,
        f"task-{number}",
        f"shop.task_{draw.randrange(6)}",
        f"queue-{draw.randrange(3)}",
        delivery_count=draw.randrange(4),
        duration_seconds=round(draw.lognormvariate(-3, 1.5), 6) if ran else None,
        wait_seconds=round(draw.expovariate(2), 6) if kind == "started" else None,
        lease_seconds=lease if told or kind in ("started", "renewed") else None,
        margin_seconds=round(draw.uniform(-1, lease), 6) if ended or kind == "renewed" else None,
        error_type=draw.choice(["OSError", "ValueError"]) if kind in ("failed", "resubmitted")
        else None,
        ts=round(BEGIN + draw.random() * 3600 * HOURS, 6),
        worker=f"w{number % 4}",
        id=f"e-{number}",
        held_seconds=round(draw.expovariate(1), 6) if told else None,
        renewals=draw.randrange(3) if told else None,
    )  # fmt: skip


def line(event: Event) -> bytes:
    return to_line(event, event.id, event.ts, quote(event.worker)).encode()


def write_log(directory: Path, events: list[Event], files: int = 6) -> list[Path]:
    """Write the events as closed files of their hours, `files` of them for each hour."""
    parts: dict[Path, list[Event]] = {}
    for number, event in enumerate(events):
        hour = int(event.ts // 3600)
        folder = directory / "date=2026-09-21" / f"hour={hour % 24:02d}"
        parts.setdefault(folder / f"{event.worker}-{number % files:03d}.jsonl", []).append(event)
    for path, its in parts.items():
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(b"".join(map(line, sorted(its, key=lambda event: event.ts))))
    return sorted(parts)


def as_frame(spark, rows: list[tuple[object, ...]], columns: str):
    """Rows with some columns of events, the others null."""
    frame = spark.createDataFrame(rows, columns)
    for column in spark.createDataFrame([], DDL).schema:
        if column.name not in frame.columns:
            frame = frame.withColumn(column.name, F.lit(None).cast(column.dataType))
    return frame


def make_hostile(directory: Path) -> dict[str, int]:
    """Add damaged lines and files to a log; returns the expected counts of each problem."""
    files = sorted(directory.glob("date=*/hour=*/*.jsonl"))
    folder = files[0].parent
    good = files[0].read_bytes()
    with files[0].open("ab") as stream:
        stream.write(good.splitlines()[0][:-7])  # torn
    with files[1].open("ab") as stream:
        stream.write(b"\0" * 4096 + b"\n")
    shutil.copy(files[2], folder / "copy-of-another.jsonl")
    wrong = [b"[1]\n", b'{"v":1}\n', b"\n", b'{"v":1,"ts":"x","task_id":5}\n', b"\xff\xfe\n"]
    (folder / "wrong.jsonl").write_bytes(b"".join(wrong))
    with (folder / "huge.jsonl").open("wb") as stream:
        for _ in range(100):
            stream.write(b"y" * (1 << 20))
        stream.write(b"\n")
    first = random_event(random.Random(5), 10**6)._replace(event="succeeded")
    back = [first._replace(id=f"back-{n}", ts=BEGIN + 1000.0 - 100.0 * n) for n in range(3)]
    (folder / "back.jsonl").write_bytes(b"".join(map(line, back)))
    (folder / "loop").symlink_to(directory)
    (folder / ".hidden.jsonl").write_bytes(good)
    (folder / "_marker.jsonl").write_bytes(good)
    (directory / ".2026-09-21T10.w9-1.jsonl").write_bytes(good[:100])
    (directory / "notes.txt").write_text("not events")
    (folder / "deeper").mkdir()
    (folder / "deeper" / "x.jsonl").write_bytes(good)
    return {
        "torn line": 1,
        "NUL bytes": 1,
        "not an event": 4,
        "empty line": 1,
        "line too long": 1,
        "clock went back": 2,
    }
