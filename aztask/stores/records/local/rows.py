"""The rows of the local result store: how runs and workers are written and read.

SQLite stores any value in any column, whatever the column's type, and Python's module aborts a
whole query for one text that is not UTF-8. So every row is checked on its own (`damage`).
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

import msgpack

from aztask.message.encryption import is_encrypted
from aztask.message.message import COUNTER_LIMIT
from aztask.queues.delivery import Position
from aztask.settlement import Complete, to_record
from aztask.stores.records.base import Outcome, RunKey, RunRecord, Start, State, WorkerRecord
from aztask.stores.records.damage import Columns, Damaged, check_ends, check_owner
from aztask.stores.records.rowsigning import REVISED, RowSigner, pack_body
from aztask.stores.records.workerrow import damaged_worker, pack_failing, pack_running, read_worker

_NAMES: Final = (
    "id", "task_id", "generation", "hop", "task", "queue", "state", "worker", "starts",
    "started_at", "settlement", "value", "error_type", "error", "traceback", "ended_at", "duration",
    "owner", "position", "failures", "snoozes", "earlier", "note", "broker", "signature",
)  # fmt: skip
SIGNATURES: Final = {"signed_results": "signature", "signed_checkpoints": "saved_signature"}
"""{component: the column of runs that it adds}. The release before passes by a component that it
does not know, and refuses a file in which one that it knows has a further step."""
COLUMNS: Final = (
    f"{', '.join(_NAMES)}, typeof(saved), "
    "(SELECT reason FROM damaged_runs WHERE damaged_runs.id = runs.id)"
)
"""The columns for `run_of`. A checkpoint may be large, so only its type is read."""
_ERROR: Final = ("error_type", "error", "traceback")
_SAVED_TYPES: Final = ("null", "blob")
_WORKER_FIELDS: Final = (
    "started_at", "queues", "running", "finished", "stopped", "leased", "tasks", "broker",
    "failing", "release",
)  # fmt: skip
_OLDEST_WORKER: Final = 5
"""The fields of a worker's row in the first release."""
_PLAIN: Final = Complete()
_TIME: Final = struct.Struct(">d")


@dataclass(frozen=True, slots=True)
class StoredRun:
    """A run's row.

    * `id`: the row's number.
    * `record`: the run, with its damage; if it is damaged, no other field of the row is trusted.
    * `marked`: it is in quarantine.
    """

    id: int
    record: RunRecord
    owner: str | None = None
    position: Position | None = None
    failures: int = 0
    snoozes: int = 0
    marked: bool = False

    @property
    def ended(self) -> Outcome | None:
        """The outcome, if the message does not come again after it; else None."""
        outcome = self.record.outcome
        return None if outcome is None or outcome.again else outcome


def run_of(row: Sequence[Any], signer: RowSigner, *, listed: bool = False) -> StoredRun:
    """The run in a row of `COLUMNS`. A row in quarantine is damaged, whatever it contains.

    Only a mark for its signature does not count (`REVISED`), unless `listed`.
    """
    columns = Columns(dict(zip(_NAMES, row, strict=False)))
    number, saved_type, reason = row[0], *row[len(_NAMES) :]
    try:
        if reason is not None and (listed or reason not in REVISED):
            raise Damaged(str(reason))
        run = _readable(columns, number, saved_type)
        if reason is not None:
            run = replace(run, marked=True)
        if _check_signature(columns, run.record, signer):
            run = replace(run, record=replace(run.record, unverified=True))
        outcome = run.record.outcome
        if outcome is not None and is_encrypted(outcome.value):
            opened = signer.opened(run.record.key, outcome)
            run = replace(run, record=replace(run.record, outcome=opened))
        return run
    except Damaged as damage:
        return StoredRun(
            number,
            RunRecord(
                _key_of(columns),
                "",
                "",
                State.UNREADABLE,
                damage=damage.reason,
                broker=_broker_of(columns),
            ),
            marked=reason is not None,
        )


def _check_signature(columns: Columns, run: RunRecord, signer: RowSigner) -> bool:
    """Check the signature of a run's outcome; returns whether it stays unverified. Raises Damaged.

    A release that knows no signatures leaves that of an earlier outcome: it names another end.
    """
    outcome = run.outcome
    if outcome is None:
        return False
    found = columns.data("signature")
    if found is not None and found[: _TIME.size] != _TIME.pack(outcome.at):
        found = None
    signature = None if found is None else found[_TIME.size :]
    unverified = signer.check_outcome(run.key, outcome, signature, run.broker)
    if signature is not None:
        signer.check_body(pack_body(outcome), signature)
    return unverified


def _broker_of(columns: Columns) -> str:
    """The owner of a damaged row, as far as it can be read."""
    try:
        return columns.text("broker", missing="")
    except Damaged:
        return ""


def has_key(row: Sequence[Any]) -> bool:
    """True if the row's own key can be read; otherwise no message can own the row."""
    try:
        _checked_key(Columns(dict(zip(_NAMES, row, strict=False))))
    except Damaged:
        return False
    return True


def _checked_key(columns: Columns) -> RunKey:
    generation, hop = (columns.count(name, most=COUNTER_LIMIT) for name in ("generation", "hop"))
    return RunKey(columns.text("task_id"), generation, hop)


def _key_of(columns: Columns) -> RunKey:
    """The key, as far as it can be read."""
    try:
        return _checked_key(columns)
    except Damaged:
        pass
    try:
        return RunKey(columns.text("task_id"))
    except Damaged:
        return RunKey("?")


def _readable(columns: Columns, number: int, saved_type: str) -> StoredRun:
    key = _checked_key(columns)
    state, ended_at = columns.state(), columns.optional_time("ended_at")
    owner, position = columns.text("owner", missing="") or None, columns.position()
    settlement, duration = columns.settlement(), columns.optional_time("duration")
    value = columns.data("value")
    error_type, error, trace = (columns.text(name, missing="") for name in _ERROR)
    check_ends(state, ended_at, settlement)
    check_owner(owner, position)
    outcome = None
    if ended_at is not None:
        decision, seconds = settlement or _PLAIN, duration or 0.0
        outcome = Outcome(state, decision, value, error_type, error, trace, ended_at, seconds)
    record = RunRecord(
        key,
        columns.text("task"),
        columns.text("queue"),
        state,
        columns.text("worker"),
        columns.count("starts"),
        columns.optional_time("started_at"),
        outcome,
        earlier=columns.starts(),
        note=columns.data("note"),
        broker=columns.text("broker", missing=""),
    )
    if saved_type not in _SAVED_TYPES:
        raise Damaged(f"its checkpoint is {saved_type}, not bytes")
    failures, snoozes = columns.count("failures"), columns.count("snoozes")
    return StoredRun(number, record, owner, position, failures, snoozes)


def key_of(key: RunKey) -> tuple[str, int, int]:
    """The column values of a run's key."""
    return key.task_id, key.generation, key.hop


def start_row(start: Start, broker: str | None = None) -> tuple[Any, ...]:
    """The column values of a new run that belongs to `broker`."""
    return (
        *key_of(start.key),
        start.task,
        start.queue,
        start.position,
        start.owner,
        start.worker,
        start.at,
        broker,
    )


def outcome_row(key: RunKey, outcome: Outcome, signer: RowSigner) -> tuple[Any, ...]:
    """The column values of an outcome, and of its signature: the end's time is in front of it."""
    outcome = signer.closed(key, outcome)
    signature = signer.sign_outcome(key, outcome, pack_body(outcome)) if signer else None
    plain = outcome.settlement == _PLAIN
    settlement = None if plain else msgpack.packb(to_record(outcome.settlement))
    return (
        outcome.state.value,
        settlement,
        outcome.value,
        outcome.error_type or None,
        outcome.error or None,
        outcome.traceback or None,
        outcome.at,
        outcome.duration,
        None if signature is None else _TIME.pack(outcome.at) + signature,
    )


def worker_row(worker: WorkerRecord, broker: str = "") -> tuple[Any, ...]:
    """The column values of a worker's row, which belongs to `broker`."""
    record = (
        worker.started_at, worker.queues, worker.running, worker.finished, worker.stopped,
        worker.leased, pack_running(worker.tasks), broker, pack_failing(worker.failing),
        worker.release,
    )  # fmt: skip
    return worker.name, worker.seen_at, msgpack.packb(record)


def worker_of(name: Any, seen_at: Any, packed: Any) -> WorkerRecord:
    """The worker in a row. Fields that a newer release adds at the end are ignored."""
    try:
        fields = Columns({"record": packed}).unpacked("record")
        if not isinstance(fields, list) or len(fields) < _OLDEST_WORKER:
            raise Damaged("its record is no list of fields")
        return read_worker(
            {"name": name, "seen_at": seen_at, **dict(zip(_WORKER_FIELDS, fields, strict=False))}
        )
    except Damaged as damage:
        return damaged_worker(name, damage)
