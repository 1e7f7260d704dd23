"""Damage: what somebody may write into the rows of a result store past aztask, and how.

Every kind is a value for each column; `ABSENT` takes the column away.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Mapping
from contextlib import AbstractContextManager, closing
from typing import Any, Final, Protocol

import msgpack
from azure.data.tables import EdmType, EntityProperty, TableClient, UpdateMode

from aztask.stores.layout import key_text, shard_of
from aztask.stores.records.base import RunKey
from aztask.stores.records.tables.names import WORKERS, partition_of, row_of

ABSENT: Final = object()
"""A column or property that is not there."""

RUN_DAMAGES: Final[dict[str, Mapping[str, object]]] = {
    "a truncated settlement": {"settlement": b"\x81\xa6set"},
    "an empty settlement": {"settlement": b""},
    "a settlement of nothing": {"settlement": b"\xc0"},
    "a settlement that is unknown": {"settlement": msgpack.packb({"settle": "vanish"})},
    "a settlement of a newer release": {
        "settlement": msgpack.packb({"settle": "complete", "later": 5})
    },
    "a forged settlement": {
        "settlement": msgpack.packb({"settle": "resubmit", "delay": "soon", "due": 1.0})
    },
    "a settlement without time": {
        "settlement": msgpack.packb({"settle": "resubmit", "due": float("nan")})
    },
    "a settlement that carries an envelope": {
        "settlement": msgpack.packb({"settle": "resubmit", "envelope": b"x"})
    },
    "a settlement that is text": {"settlement": "complete"},
    "an unknown state": {"state": "ban\x1b[31mana"},
    "a forged state": {"state": "unreadable"},
    "a state that is bytes": {"state": b"\x00\xff"},
    "starts that are text": {"starts": "many"},
    "starts below nothing": {"starts": -1},
    "failures without end": {"failures": 2**31 - 1},
    "snoozes that are a fraction": {"snoozes": 1.5},
    "a start that is text": {"started_at": "yesterday"},
    "a start that never comes": {"started_at": float("inf")},
    "an owner that is bytes": {"owner": b"one"},
    "an owner without a position": {"position": ABSENT},
    "a worker that is bytes": {"worker": b"\xff"},
    "a task that is bytes": {"task": b"\xff"},
    "a checkpoint that is text": {"saved": "half"},
}
"""What an outsider may have written into a run's row, whether it runs or has ended."""

LOCAL_DAMAGES: Final[dict[str, Mapping[str, object]]] = {
    "text that is not UTF-8": {"task": ("CAST(x'ff00fe' AS TEXT)",)},
    "a value that is text": {"value": "forged"},
    "an error that is bytes": {"error": b"\xff"},
    "a queue that is bytes": {"queue": b""},
}
TABLES_DAMAGES: Final[dict[str, Mapping[str, object]]] = {
    "a body that is text": {"body": "forged"},
    "the key of another run": {"key": msgpack.packb(("other", 0, 0))},
    "a key that is cut": {"key": b"\x93\xa1"},
    "a key that is missing": {"key": ABSENT},
    "another task's blob": {"body_blob": "2026010100/t-other!r!" + "0" * 32},
    "a blob that has no name": {"saved_blob": "../x"},
    "starts that are too large": {"starts": EntityProperty(2**40, EdmType.INT64)},
}
WORKER_DAMAGES: Final[dict[str, Mapping[str, object]]] = {
    "a time that is text": {"seen_at": "now"},
    "a record that is cut": {"record": b"\x97\xcb"},
    "a record that is no list": {"record": msgpack.packb({"started_at": 1.0})},
    "a list of tasks that is cut": {"tasks": b"\x91\x95\xa4"},
    "a task that is no task": {"tasks": msgpack.packb([[1, 2, 3, 4, 5]])},
    "a number that is text": {"running": "three"},
    "queues that are none": {"queues": msgpack.packb([1, 2])},
}
NOTE_DAMAGES: Final[dict[str, Mapping[str, object]]] = {
    "an envelope that is cut": {"envelope": b"\x9c\x01\xc4"},
    "an envelope of another letter": {"envelope": msgpack.packb([1, b"", {}])},
    "an envelope that is text": {"envelope": "x"},
    "a time that is text": {"at": "now"},
    "a count that is text": {"delivery_count": "often"},
    "a reason that is bytes": {"reason": b"\xff"},
}


class Outsider(Protocol):
    """Writes into the row of a run, a worker, a dead letter's note or a mark of cancellation."""

    def damage_run(self, key: RunKey, changes: Mapping[str, object]) -> None: ...

    def damage_worker(self, name: str, changes: Mapping[str, object]) -> None: ...

    def damage_note(self, queue: str, key: str, changes: Mapping[str, object]) -> None: ...

    def damage_mark(self, task_id: str, changes: Mapping[str, object]) -> None: ...

    def damage_document(self, workflow: str, name: str, changes: Mapping[str, object]) -> None: ...

    def damage_entry(self, name: str, changes: Mapping[str, object]) -> None: ...

    def signature_of(self, workflow: str, name: str) -> bytes:
        """The signature of a document."""
        ...

    def forge_piece(self, workflow: str, name: str, piece: bytes) -> None:
        """Append a piece to a workflow's document, with the signature of another one."""
        ...

    def raw(self, key: RunKey) -> dict[str, Any]:
        """All that is stored of a run."""
        ...


class SqlOutsider:
    """Somebody with the file and SQLite's shell."""

    def __init__(self, path: str) -> None:
        self._path = path

    def _update(self, table: str, where: str, values: tuple[Any, ...], changes: Any) -> None:
        with closing(sqlite3.connect(self._path)) as connection, connection:
            for column, value in changes.items():
                text = value[0] if isinstance(value, tuple) else "?"
                given = () if isinstance(value, tuple) else (None if value is ABSENT else value,)
                sql = f"UPDATE {table} SET {column} = {text} WHERE {where}"
                assert connection.execute(sql, (*given, *values)).rowcount == 1

    def damage_run(self, key: RunKey, changes: Mapping[str, object]) -> None:
        where = "task_id = ? AND generation = ? AND hop = ?"
        self._update("runs", where, (key.task_id, key.generation, key.hop), changes)

    def damage_worker(self, name: str, changes: Mapping[str, object]) -> None:
        with closing(sqlite3.connect(self._path)) as connection:
            sql = "SELECT record FROM workers WHERE name = ?"
            (packed,) = connection.execute(sql, (name,)).fetchone()
        fields = msgpack.unpackb(packed)
        columns: dict[str, object] = {}
        for field, value in changes.items():
            place = {"queues": 1, "running": 2, "tasks": 6}.get(field)
            if place is None:
                columns[field] = value
            else:
                unpack = field == "queues" and isinstance(value, bytes)
                fields[place] = msgpack.unpackb(value) if unpack else value
                columns["record"] = msgpack.packb(fields)
        self._update("workers", "name = ?", (name,), columns)

    def damage_note(self, queue: str, key: str, changes: Mapping[str, object]) -> None:
        where = "queue = ? AND key = ?"
        with closing(sqlite3.connect(self._path)) as connection:
            sql = f"SELECT 1 FROM owned_dead_index WHERE {where}"
            owned = connection.execute(sql, (queue, key)).fetchone()
        self._update("owned_dead_index" if owned else "dead_index", where, (queue, key), changes)

    def damage_mark(self, task_id: str, changes: Mapping[str, object]) -> None:
        self._update("cancellations", "task_id = ?", (task_id,), changes)

    def damage_document(self, workflow: str, name: str, changes: Mapping[str, object]) -> None:
        self._update("workflow_documents", "workflow = ? AND name = ?", (workflow, name), changes)

    def signature_of(self, workflow: str, name: str) -> bytes:
        with closing(sqlite3.connect(self._path)) as connection:
            sql = "SELECT signature FROM workflow_documents WHERE workflow = ? AND name = ?"
            (found,) = connection.execute(sql, (workflow, name)).fetchone()
        return bytes(found)

    def damage_entry(self, name: str, changes: Mapping[str, object]) -> None:
        self._update("owned_controls", "name = ?", (name,), changes)

    def forge_piece(self, workflow: str, name: str, piece: bytes) -> None:
        with closing(sqlite3.connect(self._path)) as connection, connection:
            sql = "SELECT data, signature FROM workflow_documents WHERE workflow = ? AND name = ?"
            data, signed = connection.execute(sql, (workflow, name)).fetchone()
        entries = msgpack.Unpacker(max_buffer_size=0)
        entries.feed(signed)
        signed += msgpack.packb([len(piece), list(entries)[-1][1]])
        changes = {"data": data + piece, "signature": signed}
        self.damage_document(workflow, name, changes)

    def raw(self, key: RunKey) -> dict[str, Any]:
        with closing(sqlite3.connect(self._path)) as connection:
            connection.row_factory = sqlite3.Row
            connection.text_factory = bytes
            sql = "SELECT * FROM runs WHERE task_id = ? AND generation = ? AND hop = ?"
            return dict(connection.execute(sql, (key.task_id, key.generation, key.hop)).fetchone())


class TableOutsider:
    """Somebody with the account's key and a table client."""

    def __init__(self, account: str, table: str) -> None:
        self._account = account
        self._table = table

    def _opened(self) -> AbstractContextManager[Any]:
        return TableClient.from_connection_string(self._account, self._table)

    def _change(self, partition: str, row: str, changes: Mapping[str, object]) -> None:
        with self._opened() as client:
            entity = client.get_entity(partition, row)
            entity.update(changes)
            kept = {name: value for name, value in entity.items() if value is not ABSENT}
            client.update_entity(kept, mode=UpdateMode.REPLACE)

    def damage_run(self, key: RunKey, changes: Mapping[str, object]) -> None:
        self._change(partition_of(key.task_id), row_of(key), changes)

    def damage_worker(self, name: str, changes: Mapping[str, object]) -> None:
        # here a record's fields are properties
        known = {"queues" if field == "record" else field: changes[field] for field in changes}
        self._change(WORKERS, key_text(name), known)

    def damage_note(self, queue: str, key: str, changes: Mapping[str, object]) -> None:
        known = {"envelope": "envelope0", "reason": "why"}
        with self._opened() as client:
            row = {"row": f"k-{key_text(key)}", "first": "D-", "last": "e"}
            text = "PartitionKey ge @first and PartitionKey lt @last and RowKey eq @row"
            found = client.query_entities(text, parameters=row)
            ends = f"-{key_text(queue)}"
            (known_row,) = [each for each in found if each["PartitionKey"].endswith(ends)]
            partition, number = known_row["PartitionKey"], known_row["number"]
        changed = {known.get(field, field): value for field, value in changes.items()}
        self._change(partition, number, changed)

    def damage_mark(self, task_id: str, changes: Mapping[str, object]) -> None:
        partition = partition_of(task_id)
        self._change(f"c-{shard_of(partition)}", partition, changes)

    def damage_document(self, workflow: str, name: str, changes: Mapping[str, object]) -> None:
        self._change(f"g-{key_text(workflow)};{name}", "d", changes)

    def signature_of(self, workflow: str, name: str) -> bytes:
        with self._opened() as client:
            return bytes(client.get_entity(f"g-{key_text(workflow)};{name}", "d")["signature"])

    def damage_entry(self, name: str, changes: Mapping[str, object]) -> None:
        with self._opened() as client:
            text = "PartitionKey ge @first and PartitionKey lt @last"
            (found,) = [
                each
                for each in client.query_entities(text, parameters={"first": "K-", "last": "K."})
                if each["PartitionKey"].endswith(f"-{key_text(name)}")
            ]
        self._change(found["PartitionKey"], found["RowKey"], changes)

    def forge_piece(self, workflow: str, name: str, piece: bytes) -> None:
        partition = f"g-{key_text(workflow)};{name}"
        with self._opened() as client:
            found = client.get_entity(partition, "d")
        signatures = [each for name, each in found.items() if name.startswith("signature_")]
        self._change(partition, "d", {"piece_x": piece, "signature_x": signatures[0]})

    def raw(self, key: RunKey) -> dict[str, Any]:
        with self._opened() as client:
            return dict(client.get_entity(partition_of(key.task_id), row_of(key)))
