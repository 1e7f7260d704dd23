"""Histories of steps in every store of rows: made once, read with one request, signed with keys."""

from __future__ import annotations

from dataclasses import replace

import pytest

from aztask.address.owner import NO_OWNER, Owner
from aztask.errors import StepsDamaged
from aztask.message.codec import Codec
from aztask.message.encryption import Cipher
from aztask.message.message import TaskMessage
from aztask.message.signatures import SignatureRules
from aztask.steps.keepers import StoredSteps
from aztask.steps.records import DONE, RETRYING, STEP, StepRecord, StepStore
from aztask.stores.rows import RowStore

MINE = Owner("servicebus://mine.servicebus.windows.net", "shop")
KEY = b"0123456789abcdef"
RECORD = StepRecord(STEP, DONE, "charge", "", "1", False, 1, b"\x01", 1_800_000_000.0)
PLAIN, SIGNING = Codec(), Codec(signing_keys=[KEY])
ENCRYPTING = Codec(signing_keys=[KEY], cipher=Cipher([KEY * 2], encrypt=True))
STRICT = Codec(signing_keys=[KEY], signatures=SignatureRules(old=False))


@pytest.fixture(params=[NO_OWNER, MINE], ids=["no owner", "owner"])
def owner(request: pytest.FixtureRequest) -> Owner:
    found: Owner = request.param
    return found


@pytest.fixture(params=[PLAIN, SIGNING, ENCRYPTING], ids=["plain", "signed", "encrypted"])
def store(request: pytest.FixtureRequest, rows: RowStore, owner: Owner) -> StepStore:
    return StepStore(rows, owner, request.param)


def steps(store: StepStore, task_id: str = "t") -> StoredSteps:
    return StoredSteps(store, TaskMessage(task_id, "shop.order", "q", b""), PLAIN, None, 0)


@pytest.mark.parametrize("task_id", ["t", "a/b?c#d", "ä" * 300, "x:0"])
def test_what_is_recorded_is_read_in_order_of_the_numbers(store: StepStore, task_id: str) -> None:
    records = [
        replace(RECORD, name=f"step {9 - number} \x00ä", number=number) for number in range(1, 9)
    ]
    for record in reversed(records):
        assert store.write(task_id, "0", record, None) is not None
    assert [record for _, record in store.read(task_id, "0")] == records
    assert store.read("other", "0") == []


def test_histories_of_one_task_are_apart(store: StepStore) -> None:
    for history in ("0", "10", "2", "0.1"):
        assert store.write("t", history, replace(RECORD, value=history.encode()), None)
    for history in ("0", "10", "2", "0.1"):
        assert [each.value for _, each in store.read("t", history)] == [history.encode()]
    assert store.histories("t")[0] == "0"
    assert set(store.histories("t")) == {"0", "10", "2", "0.1"}


def test_the_first_record_of_a_step_stands(store: StepStore) -> None:
    frozen, other = steps(store), steps(store)
    assert frozen.read() == other.read() == []
    assert other.write(RECORD) == RECORD
    assert frozen.write(replace(RECORD, value=b"\x02")) == RECORD
    assert steps(store).read() == [RECORD]


def test_a_step_that_is_retried_changes_its_row(store: StepStore) -> None:
    first = steps(store)
    failed = replace(RECORD, state=RETRYING, attempts=1)
    assert first.write(failed) == failed
    second = steps(store)
    assert second.read() == [failed]
    assert second.write(RECORD) == RECORD
    assert first.write(replace(failed, attempts=2)) == RECORD, "the frozen one does not undo it"


def test_long_values_fit(store: StepStore) -> None:
    long = replace(RECORD, value=b"x" * 200_000)
    assert store.write("t", "0", long, None) is not None
    assert [record for _, record in store.read("t", "0")] == [long]


def test_only_unchanged_rows_are_removed(store: StepStore) -> None:
    failed = replace(RECORD, state=RETRYING)
    row = store.write("t", "0", failed, None)
    assert row is not None
    assert store.write("t", "0", RECORD, row) is not None
    assert store.remove([row]) == 0
    assert store.remove([row for row, _ in store.read("t", "0")]) == 1
    assert store.read("t", "0") == []


def test_a_row_that_was_not_signed_for_its_place_is_refused(rows: RowStore) -> None:
    signed, plain = StepStore(rows, MINE, STRICT), StepStore(rows, MINE, PLAIN)
    other = StepStore(rows, MINE, Codec(signing_keys=[b"another key of it"]))
    for forger, task_id in ((plain, "a"), (other, "b")):
        forger.write(task_id, "0", RECORD, None)
        with pytest.raises(StepsDamaged, match=f"task {task_id} cannot be read"):
            signed.read(task_id, "0")
    row = signed.write("c", "0", RECORD, None)
    assert row is not None
    for place in (
        row.place._replace(partition="d"),
        row.place._replace(key="1" + row.place.key[1:]),
    ):
        signed._rows.put(place, row.values)
        with pytest.raises(StepsDamaged):
            signed.read(place.partition, place.key.partition(":")[0])
    assert signed.read("c", "0")


def test_no_signature_shows_that_an_older_record_of_a_step_was_put_back(rows: RowStore) -> None:
    """The step then runs again, under the same key, by which what it calls can tell."""
    signed = StepStore(rows, MINE, STRICT)
    failed = replace(RECORD, state=RETRYING)
    before = signed.write("t", "0", failed, None)
    assert before is not None
    assert signed.write("t", "0", RECORD, before) is not None
    assert [record for _, record in signed.read("t", "0")] == [RECORD]
    signed._rows.put(before.place, before.values)
    assert [record for _, record in signed.read("t", "0")] == [failed]


def test_unsigned_steps_count_until_old_signatures_end_and_signed_ones_are_read_without_keys(
    rows: RowStore,
) -> None:
    signed, plain = StepStore(rows, MINE, SIGNING), StepStore(rows, MINE, PLAIN)
    plain.write("a", "0", RECORD, None)
    signed.write("b", "0", RECORD, None)
    for task_id in ("a", "b"):
        for reader in (signed, plain):
            assert [record for _, record in reader.read(task_id, "0")] == [RECORD]
    with pytest.raises(StepsDamaged, match="not signed, and old_signatures is False"):
        StepStore(rows, MINE, STRICT).read("a", "0")


@pytest.mark.parametrize("data", [b"", b"\xc1", b"\x90", b"\x92\x01\x02", b"\x91\x02"])
def test_damage_is_said(rows: RowStore, data: bytes) -> None:
    store = StepStore(rows, MINE, PLAIN)
    row = store.write("t", "0", RECORD, None)
    assert row is not None
    store._rows.put(row.place, {"data": data})
    with pytest.raises(StepsDamaged, match="dlq replay --fresh"):
        store.read("t", "0")
    assert list(store.opened([row._replace(values={"data": data})])) == []
