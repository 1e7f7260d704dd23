"""Streams in every store of rows: appended once, read in order, signed with keys."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import pytest

from aztask.address.owner import NO_OWNER, Owner
from aztask.errors import BrokerUnavailable, ResultDamaged
from aztask.message.codec import Codec
from aztask.message.encryption import Cipher
from aztask.message.message import TaskMessage
from aztask.message.signatures import SignatureRules
from aztask.steps.parts import PAGE, PARTS, PartStore, Take, take_of
from aztask.stores.rows import Change, RowStore

MINE = Owner("servicebus://mine.servicebus.windows.net", "shop")
PLAIN, SIGNING = Codec(), Codec(signing_keys=[b"0123456789abcdef"])
ENCRYPTING = Codec(signing_keys=[b"0123456789abcdef"], cipher=Cipher([bytes(32)], encrypt=True))
STRICT = Codec(signing_keys=[b"0123456789abcdef"], signatures=SignatureRules(old=False))
MESSAGE = TaskMessage("t", "shop.ask", "q", b"")
TASKS = ["t", "a/b?c#d", "ä" * 300, "x:0"]


@pytest.fixture(params=[NO_OWNER, MINE], ids=["no owner", "owner"])
def owner(request: pytest.FixtureRequest) -> Owner:
    found: Owner = request.param
    return found


@pytest.fixture(params=[PLAIN, SIGNING, ENCRYPTING], ids=["plain", "signed", "encrypted"])
def store(request: pytest.FixtureRequest, rows: RowStore, owner: Owner) -> PartStore:
    return PartStore(rows, owner, request.param)


@pytest.mark.parametrize("task_id", TASKS)
def test_parts_are_read_in_order_and_behind_a_number(store: PartStore, task_id: str) -> None:
    take = Take(take_of(MESSAGE, 1))
    store.append(task_id, take, 1, [b"1", b"2"], new=True)
    store.append(task_id, take, 3, [b"3"], new=False)
    store.append("other", Take(take_of(MESSAGE, 1)), 1, [b"x"], new=True)
    found = store.read(task_id)
    assert [each.name for each in found.takes] == [take.name]
    assert found.parts == {take.name: [(1, b"1"), (2, b"2"), (3, b"3")]}
    later = store.read(task_id, take.name, 2)
    assert later.parts == {take.name: [(3, b"3")]}
    assert [each.name for each in later.takes] == [take.name]
    assert store.read("nothing").takes == []


def test_an_append_that_is_made_again_doubles_nothing(store: PartStore) -> None:
    """Its answer was lost: its position is its key."""
    take = Take(take_of(MESSAGE, 1))
    for _ in range(2):
        store.append("t", take, 1, [b"1", b"2"], new=True)
        store.append("t", take, 3, [b"3"], new=False)
    assert store.read("t").parts == {take.name: [(1, b"1"), (2, b"2"), (3, b"3")]}


@pytest.mark.parametrize("task_id", TASKS)
def test_the_mark_of_a_wait_is_the_newest_and_no_part(store: PartStore, task_id: str) -> None:
    assert store.marked(task_id) == ("", 0)
    take = Take(take_of(MESSAGE, 1))
    store.append(task_id, take, 1, [b"1", b"2"], new=True)
    store.mark(task_id, take.name, 2)
    store.mark(task_id, take.name, 1)
    assert store.marked(task_id) == (take.name, 1)
    found = store.read(task_id)
    assert found.parts == {take.name: [(1, b"1"), (2, b"2")]}
    assert [each.name for each in found.takes] == [take.name]
    assert store.forget(task_id) == 3
    assert store.marked(task_id) == ("", 0)


def test_a_mark_without_the_right_signature_is_refused(rows: RowStore) -> None:
    signed, plain = PartStore(rows, MINE, STRICT), PartStore(rows, MINE, PLAIN)
    plain.mark("t", "take", 1)
    with pytest.raises(ResultDamaged, match="stream of task t cannot be read"):
        signed.marked("t")


def test_the_take_of_the_newest_delivery_is_the_last_whenever_it_is_written(
    store: PartStore,
) -> None:
    """A worker that was frozen before its first part writes where no reader looks."""
    deliveries = [(MESSAGE, 9), (MESSAGE, 10), (replace(MESSAGE, hop=1), 1)]
    deliveries.append((replace(MESSAGE, generation=1), 1))
    takes = [Take(take_of(message, count)) for message, count in deliveries]
    for take in reversed(takes):
        store.append("t", take, 1, [take.token.encode()], new=True)
    assert [each.name for each in store.read("t").takes] == [take.name for take in takes]
    behind = store.read("t", takes[1].name, 1)
    assert takes[0].name not in behind.parts, "those of earlier takes are not read again"
    assert set(behind.parts) == {take.name for take in takes[2:]}


def test_long_streams_and_large_parts(store: PartStore) -> None:
    take = Take(take_of(MESSAGE, 1))
    store.append("t", take, 1, [bytes(64 * 1024)] * 4, new=True)
    for number in range(5, PAGE + 20):
        store.append("t", take, number, [b"x"], new=False)
    found = store.read("t").parts[take.name]
    assert [number for number, _ in found] == list(range(1, PAGE + 20))
    assert len(found[3][1]) == 64 * 1024
    assert store.forget("t") == PAGE + 20 - 5 + 2
    assert store.read("t").takes == []


def test_only_old_streams_of_unknown_tasks_are_purged(store: PartStore, rows: RowStore) -> None:
    for task_id in ("known", "gone"):
        store.append(task_id, Take(take_of(MESSAGE, 1)), 1, [b"1"], new=True)
    results = SimpleNamespace(get=lambda task_id: "a run" if task_id == "known" else None)
    assert store.purge(rows.now() - 3600.0, results) == 0
    assert store.purge(rows.now() + 3600.0, results) == 2
    assert store.read("gone").takes == []
    assert len(store.read("known").takes) == 1


def test_unsigned_parts_count_until_old_signatures_end_and_signed_ones_are_read_without_keys(
    rows: RowStore,
) -> None:
    signed, plain = PartStore(rows, MINE, SIGNING), PartStore(rows, MINE, PLAIN)
    take = Take(take_of(MESSAGE, 1))
    plain.append("a", take, 1, [b"1"], new=True)
    signed.append("b", take, 1, [b"1"], new=True)
    for task_id in ("a", "b"):
        for reader in (signed, plain):
            assert reader.read(task_id).parts == {take.name: [(1, b"1")]}
    with pytest.raises(ResultDamaged, match="not signed, and old_signatures is False"):
        PartStore(rows, MINE, STRICT).read("a")


def test_a_part_without_the_right_signature_is_refused(rows: RowStore) -> None:
    signed, plain = PartStore(rows, MINE, STRICT), PartStore(rows, MINE, PLAIN)
    other = PartStore(rows, MINE, Codec(signing_keys=[b"another key of it"]))
    for number, writer in enumerate((plain, other)):
        writer.append(f"t{number}", Take(take_of(MESSAGE, 1)), 1, [b"1"], new=True)
        with pytest.raises(ResultDamaged, match=f"stream of task t{number} cannot be read"):
            signed.read(f"t{number}")
    take = Take(take_of(MESSAGE, 1))
    signed.append("t", take, 1, [b"1"], new=True)
    signed.append("t", take, 2, [b"2"], new=False)
    kind = rows.of(PARTS)
    second, first = kind.range(MINE.of_broker, "t", "p:", "q")[::-1]
    copied = Change(second.place, {"data": first.values["data"]}, second)
    assert kind.write(copied) is not None
    with pytest.raises(ResultDamaged):
        signed.read("t")


def test_a_damaged_part_is_told_in_one_line(rows: RowStore) -> None:
    store = PartStore(rows, MINE, PLAIN)
    take = Take(take_of(MESSAGE, 1))
    store.append("t", take, 1, [b"1"], new=True)
    kind = rows.of(PARTS)
    (row,) = kind.range(MINE.of_broker, "t", "p:", "q")
    for damage in (b"", b"\xc1", b"\x93\x07\x01\x02", b"\x92\x01\x01"):
        row = kind.write(Change(row.place, {"data": damage}, row)) or row
        with pytest.raises(ResultDamaged, match="its other results are not affected") as caught:
            store.read("t")
        assert "\n" not in str(caught.value)
        assert not isinstance(caught.value, BrokerUnavailable)
