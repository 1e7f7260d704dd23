"""The rows of the table: how runs, marks and workers are named and written.

Partitions
* ``t-TASK``: everything of one task. A run's row is named (generation, hop) counted down, so that
  the latest comes first, then ``r``; ``e`` names the note that the run is expected.
* ``c-SHARD``: marks of cancelled tasks. ``i-SHARD-STATE-HOUR``: ended runs, see `tables_index`.
  ``w``: workers. ``d-QUEUE``: dead letters, see `tables_dead`.

Keys hold letters, digits and a few signs only: whatever else a task id has is escaped, and a long
one is hashed. (The service forbids ``/ \\ # ?`` and control characters, and more than 1 KiB.)
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from hashlib import sha256
from typing import TYPE_CHECKING, Any, Final, cast
from zlib import crc32

import msgpack

from aztask.delivery import Position
from aztask.results.base import (
    Outcome,
    RunKey,
    RunRecord,
    Start,
    State,
    WorkerRecord,
)
from aztask.results.runningtasks import NOTHING_RUNS, pack_running, unpack_running
from aztask.settlement import Decision, from_record, to_record

if TYPE_CHECKING:
    from azure.data.tables import TableEntity

SHARDS: Final = 4
"""A partition takes 2,000 requests a second, an account 20,000: at four for each task these are
enough."""

INLINE_BYTES: Final = 60 * 1024
"""What is longer goes to a blob: a property holds 64 KiB, a row 1 MiB."""

WORKERS: Final = "w"
_LONGEST_KEY: Final = 250
_LONGEST_TEXT: Final = 4096
_TOP: Final = 10**19
_PLAIN: Final = re.compile(r"[^A-Za-z0-9.:-]")


def key_text(text: str) -> str:
    """`text` as a part of a key, never the same for two texts."""
    escaped = _PLAIN.sub(lambda match: f"_{ord(match[0]):x}_", text)
    if len(escaped) <= _LONGEST_KEY:
        return escaped
    return f"~{sha256(text.encode('utf-8', 'surrogatepass')).hexdigest()}"


def partition_of(task_id: str) -> str:
    """The partition of a task."""
    return f"t-{key_text(task_id)}"


def shard_of(partition: str) -> int:
    """Which of the shards a task belongs to."""
    return crc32(partition.encode()) % SHARDS


def row_of(key: RunKey, kind: str = "r") -> str:
    """A run's row key; kind: ``r`` for the run, ``e`` for the note that it is expected."""
    return f"{_TOP - key.generation:020d}-{_TOP - key.hop:020d}-{kind}"


@dataclass(frozen=True, slots=True)
class Run:
    """A run's row. tag: its ETag, "" before it is stored. owner: "" for nobody.

    body: the packed value, error and traceback, or where it is long, body_blob: the name of the
    blob that holds it. saved and saved_blob: the same for the checkpoint.
    """

    key: RunKey
    task: str
    queue: str
    position: Position | None = None
    owner: str = ""
    worker: str = ""
    starts: int = 0
    started_at: float | None = None
    state: State = State.PENDING
    failures: int = 0
    snoozes: int = 0
    settlement: Decision | None = None
    ended_at: float | None = None
    duration: float = 0.0
    body: bytes | None = None
    body_blob: str = ""
    saved: bytes | None = None
    saved_blob: str = ""
    tag: str = ""

    @property
    def ended(self) -> bool:
        """Whether there is an outcome after which the message does not come again."""
        known = self.outcome(b"")
        return known is not None and not known.again

    def outcome(self, body: bytes | None) -> Outcome | None:
        """How it ended, with what `body` holds; None before."""
        if self.ended_at is None or self.settlement is None:
            return None
        value, error_type, error, traceback = unpack(body) if body else (None, "", "", "")
        return Outcome(
            self.state,
            self.settlement,
            value,
            error_type,
            error,
            traceback,
            self.ended_at,
            self.duration,
        )

    def record(self, body: bytes | None) -> RunRecord:
        """The run as the protocol shows it."""
        return RunRecord(
            self.key,
            self.task,
            self.queue,
            self.state,
            self.worker,
            self.starts,
            self.started_at,
            self.outcome(body),
        )

    def started(self, start: Start) -> Run:
        """Owned by `start`, without the outcome of an earlier one."""
        return replace(
            self,
            position=start.position,
            queue=start.queue,
            owner=start.owner,
            worker=start.worker,
            starts=self.starts + 1,
            started_at=start.at,
            state=State.STARTED,
            settlement=None,
            ended_at=None,
            duration=0.0,
            body=None,
            body_blob="",
        )

    def finished(self, outcome: Outcome, body: bytes | None, blob: str) -> Run:
        """With that outcome, whose body is inline or in the blob."""
        again = outcome.again
        return replace(
            self,
            state=outcome.state,
            settlement=outcome.settlement,
            ended_at=outcome.at,
            duration=outcome.duration,
            body=body,
            body_blob=blob,
            starts=0 if again else self.starts,
            failures=self.failures + (again and outcome.state is State.RETRYING),
            snoozes=self.snoozes + (again and outcome.state is State.SNOOZED),
            saved=self.saved if again else None,
            saved_blob=self.saved_blob if again else "",
        )


def new_run(start: Start) -> Run:
    """The row of a run that nobody has started before."""
    return Run(start.key, start.task, start.queue).started(start)


def pack(outcome: Outcome) -> bytes | None:
    """What may be long of an outcome; None where there is nothing."""
    parts = (outcome.value, outcome.error_type, outcome.error, outcome.traceback)
    if not any(part is not None and part != "" for part in parts):
        return None
    packed: bytes = msgpack.packb(parts, unicode_errors="surrogatepass")
    return packed


def unpack(body: bytes) -> tuple[bytes | None, str, str, str]:
    """Value, error type, error and traceback."""
    value, error_type, error, traceback = msgpack.unpackb(body, unicode_errors="surrogatepass")
    return value, error_type, error, traceback


def entity_of(run: Run) -> dict[str, Any]:
    """The row as the service takes it; what is empty is left out."""
    text = {
        "task": run.task,
        "queue": run.queue,
        "owner": run.owner,
        "worker": run.worker,
        "body_blob": run.body_blob,
        "saved_blob": run.saved_blob,
    }
    optional = {
        "started_at": run.started_at,
        "ended_at": run.ended_at,
        "body": run.body,
        "saved": run.saved,
        "position": None if run.position is None else msgpack.packb(run.position),
        "settlement": None if run.settlement is None else msgpack.packb(to_record(run.settlement)),
    }
    return {
        "PartitionKey": partition_of(run.key.task_id),
        "RowKey": row_of(run.key),
        **key_properties(run.key),
        "state": run.state.value,
        "starts": run.starts,
        "failures": run.failures,
        "snoozes": run.snoozes,
        "duration": float(run.duration),
        **{name: plain(value) for name, value in text.items() if value},
        **{name: value for name, value in optional.items() if value is not None},
    }


def run_of(entity: Mapping[str, Any]) -> Run:
    """The row that was read."""
    settlement, position = entity.get("settlement"), entity.get("position")
    return Run(
        key_of(entity),
        entity.get("task", ""),
        entity.get("queue", ""),
        None if position is None else msgpack.unpackb(position),
        entity.get("owner", ""),
        entity.get("worker", ""),
        entity["starts"],
        entity.get("started_at"),
        State(entity["state"]),
        entity["failures"],
        entity["snoozes"],
        None if settlement is None else from_record(msgpack.unpackb(settlement)),
        entity.get("ended_at"),
        entity["duration"],
        entity.get("body"),
        entity.get("body_blob", ""),
        entity.get("saved"),
        entity.get("saved_blob", ""),
        str(cast("TableEntity", entity).metadata["etag"]),
    )


def expected(run: RunRecord) -> dict[str, Any]:
    """The row that notes a run that is sent and not started."""
    return {
        "PartitionKey": partition_of(run.key.task_id),
        "RowKey": row_of(run.key, "e"),
        **key_properties(run.key),
        "task": plain(run.task),
        "queue": plain(run.queue),
    }


def pending(entity: Mapping[str, Any]) -> RunRecord:
    """The run of such a row."""
    return RunRecord(key_of(entity), entity.get("task", ""), entity.get("queue", ""), State.PENDING)


def key_properties(key: RunKey) -> dict[str, Any]:
    """The run's key, from which the escaped and hashed one cannot be read back."""
    return {"key": msgpack.packb((key.task_id, key.generation, key.hop), unicode_errors=_PASS)}


def key_of(entity: Mapping[str, Any]) -> RunKey:
    """The key that `key_properties` wrote."""
    return RunKey(*msgpack.unpackb(entity["key"], unicode_errors=_PASS))


_PASS: Final = "surrogatepass"


def worker_entity(worker: WorkerRecord) -> dict[str, Any]:
    """A worker's sign of life."""
    return {
        "PartitionKey": WORKERS,
        "RowKey": key_text(worker.name),
        "name": plain(worker.name),
        "started_at": float(worker.started_at),
        "seen_at": float(worker.seen_at),
        "queues": msgpack.packb(worker.queues),
        "running": worker.running,
        "finished": str(worker.finished),
        "stopped": worker.stopped,
        "leased": worker.leased,
        "tasks": pack_running(worker.tasks),
    }


def worker_of(entity: Mapping[str, Any]) -> WorkerRecord:
    """The worker of such a row."""
    return WorkerRecord(
        entity["name"],
        entity["started_at"],
        entity["seen_at"],
        tuple(msgpack.unpackb(entity["queues"])),
        entity["running"],
        int(entity["finished"]),
        entity["stopped"],
        entity.get("leased", 0),
        unpack_running(entity.get("tasks", NOTHING_RUNS)),
    )


def plain(text: str) -> str:
    """Text that a property takes: not too long, and without lone surrogates."""
    return text[:_LONGEST_TEXT].encode("utf-8", "replace").decode()
