"""Finds the events of one task in the local event directory."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from aztask.stores.events.event import Event, from_line, quote
from aztask.stores.events.sink import LINE_LIMIT, open_files

BLOCK: Final = 4 << 20
"""Bytes that are searched at a time; more than `LINE_LIMIT`."""


@dataclass(slots=True)
class EventLog:
    """The events of one task, in the order of their times.

    * `files`: that were searched; `compacted`: Parquet files, which only Spark reads.
    * `unreadable`: files that could not be opened.
    """

    events: list[Event] = field(default_factory=list)
    files: int = 0
    compacted: int = 0
    unreadable: int = 0


def events_of(directory: str | Path, task_id: str) -> EventLog:
    """Search all files of a directory for the events of a task, open ones included.

    A file is searched as bytes, and only lines with the id are read: gigabytes take seconds.
    """
    root, log = Path(directory), EventLog()
    # Open files are listed first: a file that is published in between is in both.
    still_open = open_files(root)
    published = sorted(root.glob("date=*/hour=*/[!._]*.jsonl"))
    log.compacted = sum(1 for _ in root.glob("date=*/hour=*/[!._]*.parquet"))
    found: dict[str, Event] = {}
    for path in (*still_open, *published):
        try:
            for event in _in_file(path, task_id):
                found.setdefault(event.id, event)
        except FileNotFoundError:
            continue
        except OSError:
            log.unreadable += 1
        else:
            log.files += 1
    log.events = sorted(found.values(), key=_order)
    return log


_KINDS: Final = ("enqueued", "send_unconfirmed", "received", "started")


def _order(event: Event) -> tuple[float, int]:
    """By time; events of one instant in the order in which they follow each other."""
    place = _KINDS.index(event.event) if event.event in _KINDS else len(_KINDS)
    return event.ts, place + (event.event == "dead_lettered")


def _in_file(path: Path, task_id: str) -> Iterator[Event]:
    quoted = f'"task_id":{quote(task_id)}'.encode()
    # Other programs may write the same line with other spaces or escapes.
    spaced = json.dumps({"task_id": task_id})[1:-1].encode()
    rest = b""
    with path.open("rb") as stream:
        while data := stream.read(BLOCK):
            block, newline, rest = (rest + data).rpartition(b"\n")
            if newline and (quoted in block or spaced in block):
                for line in block.split(b"\n"):
                    if quoted not in line and spaced not in line:
                        continue
                    event = from_line(line.strip(b"\0\r\n "))
                    if event is not None and quote(event.task_id) == quote(task_id):
                        yield event
            if len(rest) > LINE_LIMIT:
                rest = b""


# -- one entry of a task's history ---------------------------------------------------------


GAP: Final = "gap"


@dataclass(frozen=True, slots=True)
class LogEntry:
    """Something that happened to a task, or a gap.

    * `at`: UTC epoch seconds; None for a gap whose time is not known.
    * `kind`: of an event (see `aztask.stores.events.event`), ``start`` or an outcome's state for
      what only a row knows, or `GAP`.
    * `text`: what happened, in words; not masked against terminals.
    * `source`: ``event``, ``row`` or ``both``; "" for a gap.
    * `worker`: that it happened on, or the sender.
    * `delivery`: the broker's delivery count, if it is known.
    """

    at: float | None
    kind: str
    text: str
    source: str = ""
    worker: str = ""
    delivery: int | None = None


def gap(text: str, at: float | None = None) -> LogEntry:
    """A gap: `text` says what is not known."""
    return LogEntry(at, GAP, text)


def seconds(value: float) -> str:
    """A duration with three digits: ``0.00123 s``, ``12.5 s``, ``123 s``."""
    return f"{value:.0f} s" if abs(value) >= 1000 else f"{value:.3g} s"
