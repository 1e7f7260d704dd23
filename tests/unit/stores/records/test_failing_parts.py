"""The failing parts in a worker's heartbeat, beside releases that know nothing of them."""

from __future__ import annotations

import msgpack

from aztask.stores.records.base import WorkerRecord
from aztask.stores.records.local import rows as local
from aztask.stores.records.tables import rows as tables
from aztask.support.parts import PartFailure

FAILING = (
    PartFailure("schedules", 5.0, "403"),
    PartFailure("schedule nightly", 6.0, "TypeError: no"),
)
RECORD = WorkerRecord("w", 1.0, 2.0, ("default",), 0, 3, failing=FAILING)


def test_they_are_kept_by_both_stores() -> None:
    assert local.worker_of(*local.worker_row(RECORD)).failing == FAILING
    assert tables.worker_of(tables.worker_entity(RECORD)).failing == FAILING


def test_a_heartbeat_of_the_release_before_has_none() -> None:
    name, seen_at, packed = local.worker_row(RECORD)
    old = msgpack.packb(msgpack.unpackb(packed)[:-2])
    assert local.worker_of(name, seen_at, old) == WorkerRecord("w", 1.0, 2.0, ("default",), 0, 3)
    entity = tables.worker_entity(RECORD)
    del entity["failing"]
    assert tables.worker_of(entity).failing == ()


def test_a_damaged_list_is_named() -> None:
    entity = {**tables.worker_entity(RECORD), "failing": b"\x01"}
    assert "parts" in tables.worker_of(entity).damage
