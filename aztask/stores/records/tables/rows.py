"""The rows of the table: how runs and workers are written and read.

Anyone with permission may have changed a row, so each one is checked on its own (`damage`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Final, cast

import msgpack

from aztask.message.message import COUNTER_LIMIT, changed
from aztask.queues.delivery import Position
from aztask.settlement import Decision, to_record
from aztask.stores.layout import key_text
from aztask.stores.records.base import (
    NO_STARTS,
    EarlierStarts,
    Outcome,
    RunKey,
    RunRecord,
    Start,
    State,
    WorkerRecord,
)
from aztask.stores.records.damage import Columns, Damaged, check_ends, check_owner, unpacked
from aztask.stores.records.rowsigning import REVISED, RowSigner
from aztask.stores.records.tables.names import WORKERS, is_blob_of, key_of_row, partition_of, row_of
from aztask.stores.records.workerrow import damaged_worker, pack_failing, pack_running, read_worker

if TYPE_CHECKING:
    from azure.data.tables import TableEntity

INLINE_BYTES: Final = 60 * 1024
"""Longer values go to a blob: a property holds 64 KiB, a row 1 MiB."""

DAMAGE: Final = "damage"
"""The property with the reason why a run's row is in quarantine."""

LONGEST_COPY: Final = 4096
"""A longer copy of a run is not in the index: each list reads some hundred of them."""

_LONGEST_TEXT: Final = 4096
_LONGEST_NUMBER: Final = 20


@dataclass(frozen=True)  # without slots, for `changed`: each write makes two or three copies
class RunRow:
    """A run's row.

    * `tag`: its ETag, "" before it is stored.
    * `owner`: "" for none.
    * `damage`: why the row cannot be read. Then the state is UNREADABLE, and only the key, the tag,
      the place (partition and row key) and whether it is in quarantine are known.
    * `body`: the packed value, error and traceback; or, if they are long, `body_blob`: the name of
      the blob with them.
    * `saved`, `saved_blob`: the same for the checkpoint.
    * `earlier`: its starts before the last one.
    * `broker`: whose run it is; "" if that is not known. Also known of most damaged rows.
    * `signature`: of its outcome (`RowSigner.sign_outcome`); None if there is none.
    * `saved_signature`: of its checkpoint (`RowSigner.sign_saved`).
    * `unverified`: as in `RunRecord`, once `believed` has looked.
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
    damage: str = ""
    place: tuple[str, str] = ("", "")
    in_quarantine: bool = False
    earlier: EarlierStarts = NO_STARTS
    broker: str = ""
    signature: bytes | None = None
    saved_signature: bytes | None = None
    unverified: bool = False

    @property
    def ended(self) -> bool:
        """True if there is an outcome after which the message does not come again."""
        known = self.outcome(None)
        return known is not None and not known.again

    def outcome(self, body: bytes | None) -> Outcome | None:
        """How it ended, with the values in `body`; None if it did not. Raises Damaged."""
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

    def record(self, body: bytes | None, damage: str = "") -> RunRecord:
        """The run in the protocol's form. `damage` says what is wrong with the body.

        Raises Damaged for a body that cannot be read.
        """
        return RunRecord(
            self.key,
            self.task,
            self.queue,
            self.state,
            self.worker,
            self.starts,
            self.started_at,
            self.outcome(body),
            self.damage or damage,
            earlier=self.earlier,
            broker=self.broker,
            unverified=self.unverified,
        )

    def started(self, start: Start) -> RunRow:
        """A copy owned by `start`, without the outcome of an earlier start."""
        return changed(
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
            signature=None,
            unverified=False,
            earlier=self._starts().starts_before(owned=bool(self.owner)),
        )

    def _starts(self) -> RunRecord:
        """The run without a long or damaged body."""
        try:
            return self.record(self.body)
        except Damaged:
            return self.record(None)

    def finished(
        self, outcome: Outcome, body: bytes | None, blob: str, signature: bytes | None = None
    ) -> RunRow:
        """A copy with that outcome, whose body is inline or in the blob."""
        again = outcome.again
        return changed(
            self,
            state=outcome.state,
            settlement=outcome.settlement,
            ended_at=outcome.at,
            duration=outcome.duration,
            body=body,
            body_blob=blob,
            signature=signature,
            starts=0 if again else self.starts,
            failures=self.failures + (again and outcome.state is State.RETRYING),
            snoozes=self.snoozes + (again and outcome.state is State.SNOOZED),
            saved=self.saved if again else None,
            saved_blob=self.saved_blob if again else "",
            saved_signature=self.saved_signature if again else None,
        )


def new_run(start: Start) -> RunRow:
    """The row of a run's first start."""
    return RunRow(start.key, start.task, start.queue).started(start)


def unpack(body: bytes) -> tuple[bytes | None, str, str, str]:
    """(value, error type, error, traceback) that `pack_body` packed. Raises Damaged."""
    parts = unpacked(body, "value")
    if not isinstance(parts, list) or len(parts) != len(_BODY):
        raise Damaged("its value is no list of parts")
    columns = Columns(dict(zip(_BODY, parts, strict=True)))
    error_type, error, traceback = (columns.text(name, missing="") for name in _BODY[1:])
    return columns.data(_BODY[0]), error_type, error, traceback


_BODY: Final = ("value", "error_type", "error", "traceback")


def entity_of(run: RunRow) -> dict[str, Any]:
    """The row in the service's form; empty fields are omitted."""
    text = {
        "task": run.task,
        "queue": run.queue,
        "owner": run.owner,
        "worker": run.worker,
        "body_blob": run.body_blob,
        "saved_blob": run.saved_blob,
        "broker": run.broker,
    }
    optional = {
        "started_at": run.started_at,
        "ended_at": run.ended_at,
        "body": run.body,
        "saved": run.saved,
        "signature": run.signature,
        "saved_signature": run.saved_signature,
        "earlier": run.earlier.pack(),
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


def run_of(entity: Mapping[str, Any], partition: str, row: str, *, listed: bool = False) -> RunRow:
    """The run in a row that was read from that place, damaged or not.

    A mark of the quarantine for its signature does not count (`REVISED`), unless `listed`.
    """
    place, tag = (partition, row), str(cast("TableEntity", entity).metadata["etag"])
    reason = entity.get(DAMAGE)
    known = RunRow(
        key_of_row(partition, row),
        "",
        "",
        tag=tag,
        place=place,
        in_quarantine=reason is not None,
        broker=broker_in(entity),
    )
    try:
        if reason is not None and (listed or reason not in REVISED):
            raise Damaged(str(reason))
        run = _readable(Columns(entity), partition, row)
        return changed(run, tag=tag, place=place, in_quarantine=reason is not None)
    except Damaged as damage:
        return _damaged(known, damage)


def copy_of(run: RunRow) -> bytes | None:
    """What a list shows of an ended run beside its summary; None if that is long.

    No list shows a value: only the error of a run that did not succeed is in it.
    """
    succeeded = run.state is State.SUCCEEDED
    if run.settlement is None or (run.body_blob and not succeeded):
        return None
    parts = (
        key_properties(run.key)["key"],
        run.starts,
        run.started_at,
        run.ended_at,
        msgpack.packb(to_record(run.settlement)),
        run.broker,
        run.signature,
        None if succeeded else run.body,
    )
    data: bytes = msgpack.packb(parts)
    return data if len(data) <= LONGEST_COPY else None


_COPY: Final = (
    "key",
    "starts",
    "started_at",
    "ended_at",
    "settlement",
    "broker",
    "signature",
    "body",
)


def run_in_copy(copy: bytes, state: State, summary: Mapping[str, Any]) -> RunRow:
    """The run that `copy_of` wrote, without its value. Raises Damaged.

    summary: its task, queue, worker and duration.
    """
    parts = unpacked(copy, "copy")
    if not isinstance(parts, list) or len(parts) != len(_COPY):
        raise Damaged("its copy is no list of parts")
    columns = Columns({**summary, **dict(zip(_COPY, parts, strict=True))})
    run = RunRow(
        _read_key(columns),
        columns.text("task"),
        columns.text("queue"),
        worker=columns.text("worker"),
        starts=columns.count("starts"),
        started_at=columns.optional_time("started_at"),
        state=state,
        settlement=columns.settlement(),
        ended_at=columns.time("ended_at"),
        duration=columns.time("duration"),
        body=columns.data("body"),
        broker=columns.text("broker"),
        signature=columns.data("signature"),
    )
    check_ends(run.state, run.ended_at, run.settlement)
    if run.settlement is None:
        raise Damaged("its copy has no settlement")
    return run


def believed(run: RunRow, signer: RowSigner, *, valued: bool = True) -> RunRow:
    """The run; a damaged one if the signature of its outcome does not fit.

    valued: False if its value is not there.
    """
    outcome = None if run.damage else _head_of(run)
    if outcome is None:
        return run
    try:
        unverified = signer.check_outcome(run.key, outcome, run.signature, run.broker)
        if valued and not run.body_blob:
            signer.check_body(run.body, run.signature)
    except Damaged as damage:
        return _damaged(run, damage)
    return replace(run, unverified=True) if unverified else run


def _head_of(run: RunRow) -> Outcome | None:
    """The outcome without its body."""
    if run.ended_at is None or run.settlement is None:
        return None
    return Outcome(run.state, run.settlement, at=run.ended_at, duration=run.duration)


def _damaged(run: RunRow, damage: Damaged) -> RunRow:
    """What is known of a run whose row is damaged."""
    return RunRow(
        run.key,
        "",
        "",
        state=State.UNREADABLE,
        tag=run.tag,
        damage=damage.reason,
        place=run.place,
        in_quarantine=run.in_quarantine,
        broker=run.broker,
    )


def _readable(columns: Columns, partition: str, row: str) -> RunRow:
    key = _read_key(columns)
    if (partition_of(key.task_id), row_of(key)) != (partition, row):
        raise Damaged("its key is that of another row")
    run = RunRow(
        key,
        columns.text("task", missing=""),
        columns.text("queue", missing=""),
        Columns({"position": columns.unpacked("position")}).position(),
        columns.text("owner", missing=""),
        columns.text("worker", missing=""),
        columns.count("starts"),
        columns.optional_time("started_at"),
        columns.state(),
        columns.count("failures"),
        columns.count("snoozes"),
        columns.settlement(),
        columns.optional_time("ended_at"),
        columns.time("duration"),
        columns.data("body"),
        columns.text("body_blob", missing=""),
        columns.data("saved"),
        columns.text("saved_blob", missing=""),
        earlier=columns.starts(),
        broker=columns.text("broker", missing=""),
        signature=columns.data("signature"),
        saved_signature=columns.data("saved_signature"),
    )
    check_ends(run.state, run.ended_at, run.settlement)
    check_owner(run.owner, run.position)
    if run.ended_at is not None and run.settlement is None:
        raise Damaged("it has an end, but no settlement")
    if not all(is_blob_of(name, partition, row) for name in (run.body_blob, run.saved_blob)):
        raise Damaged("it names a blob that is not its own")
    return run


def broker_in(entity: Mapping[str, Any]) -> str:
    """Whose row it is, damaged or not; "" if that is not known."""
    found = entity.get("broker")
    return found if isinstance(found, str) else ""


def expected(run: RunRecord, now: float, broker: str = "") -> dict[str, Any]:
    """The row for a run that is sent but not started. `now`: UTC epoch seconds."""
    return {
        "PartitionKey": partition_of(run.key.task_id),
        "RowKey": row_of(run.key, "e"),
        **key_properties(run.key),
        "task": plain(run.task),
        "queue": plain(run.queue),
        "due": float(now if run.due is None else run.due),
        **({} if run.note is None else {"note": run.note}),
        **({"broker": broker} if broker else {}),
    }


def pending(entity: Mapping[str, Any], partition: str, row: str) -> RunRecord:
    """The run in such a row, damaged or not."""
    columns = Columns(entity)
    try:
        key, task, queue = _read_key(columns), columns.text("task"), columns.text("queue")
        if (partition_of(key.task_id), row_of(key, "e")) != (partition, row):
            raise Damaged("its key is that of another row")
        note, broker = columns.data("note"), columns.text("broker", missing="")
        return RunRecord(key, task, queue, State.PENDING, note=note, broker=broker)
    except Damaged as damage:
        key = key_of_row(partition, row)
        damaged, broker = State.UNREADABLE, broker_in(entity)
        return RunRecord(key, "", "", damaged, damage=damage.reason, broker=broker)


def key_properties(key: RunKey) -> dict[str, Any]:
    """The run's key in properties, because it cannot be read back from an escaped or hashed one."""
    return {"key": msgpack.packb((key.task_id, key.generation, key.hop), unicode_errors=_PASS)}


def _read_key(columns: Columns) -> RunKey:
    """The key that `key_properties` wrote. Raises Damaged."""
    parts = columns.unpacked("key")
    if not isinstance(parts, list) or len(parts) != len(_KEY):
        raise Damaged("its key is missing or wrong")
    found = Columns(dict(zip(_KEY, parts, strict=True)))
    generation, hop = (found.count(name, most=COUNTER_LIMIT) for name in _KEY[1:])
    return RunKey(found.text("task_id"), generation, hop)


def task_id_in(entity: Mapping[str, Any]) -> str:
    """The task id of a run's row, or of the note of one; from its place if its key is damaged."""
    try:
        return _read_key(Columns(entity)).task_id
    except Damaged:
        return key_of_row(entity["PartitionKey"], entity["RowKey"]).task_id


_KEY: Final = ("task_id", "generation", "hop")
_PASS: Final = "surrogatepass"  # noqa: S105  # the name of an error handler


def worker_entity(worker: WorkerRecord, broker: str = "") -> dict[str, Any]:
    """The row of a worker's heartbeat, which belongs to `broker`."""
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
        **({"broker": broker} if broker else {}),
        "failing": pack_failing(worker.failing),
        **({"release": worker.release} if worker.release else {}),
    }


def worker_of(entity: Mapping[str, Any]) -> WorkerRecord:
    """The worker in such a row, damaged or not."""
    columns = Columns(entity)
    try:
        finished = columns.text("finished")
        if len(finished) > _LONGEST_NUMBER or not finished.isascii() or not finished.isdecimal():
            raise Damaged("its finished is no number")
        queues = columns.unpacked("queues")
        return read_worker({**entity, "queues": queues, "finished": int(finished)})
    except Damaged as damage:
        return damaged_worker(entity.get("name"), damage)


def plain(text: str) -> str:
    """Text that a property accepts: not too long, and without lone surrogates."""
    return text[:_LONGEST_TEXT].encode("utf-8", "replace").decode()
