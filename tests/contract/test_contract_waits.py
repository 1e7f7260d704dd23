"""The rows of tasks that wait, over SQLite and over Azure Tables."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import msgpack
import pytest
from rowstores import Make

from aztask.address.owner import NO_OWNER, Owner
from aztask.message.codec import Codec
from aztask.message.encryption import Cipher
from aztask.message.signatures import SignatureRules
from aztask.steps.waits import SIGNALS, SLEEPS, VERSION, WAITS, ParkedRun, Signal, Wait, WaitStore
from aztask.stores.rows import Change, Row, RowStore

MINE, THEIRS = Owner("servicebus://mine"), Owner("servicebus://theirs")
PLAIN, SIGNING = Codec(), Codec(signing_keys=[b"0123456789abcdef"])
ENCRYPTING = Codec(signing_keys=[b"0123456789abcdef"], cipher=Cipher([bytes(32)], encrypt=True))
STRICT = Codec(signing_keys=[b"0123456789abcdef"], signatures=SignatureRules(old=False))
RUN = ParkedRun(
    "t",
    "shop.order",
    "q",
    0,
    1,
    1.8e9,
    1.9e9,
    (Wait(SIGNALS, ("a", "b"), 1.9e9), Wait(SLEEPS, (), 2e9)),
    b"message",
)
SOON = 10.0


def add(store: WaitStore, task_id: str, name: str, value: bytes) -> Signal:
    """Store a signal of a task that has not taken it."""
    (made,) = store.add_all([task_id], name, value)
    assert made is not None
    return made


@pytest.fixture(params=[NO_OWNER, MINE], ids=["no owner", "owner"])
def store(request: pytest.FixtureRequest, rows: RowStore) -> WaitStore:
    return WaitStore(rows, request.param, PLAIN)


@pytest.mark.parametrize("task_id", ["t", "a/b?c#d", "ä" * 300, "x:0"])
def test_a_run_and_its_signals_are_read_together(store: WaitStore, task_id: str) -> None:
    run = replace(RUN, id=task_id)
    assert store.park(run, 1e10)
    for number in range(5):
        add(store, task_id, f"name {number % 2} ä", bytes([number]))
    add(store, "other", "name 0 ä", b"x")
    found = store.read(task_id)
    assert found.parked is not None
    assert replace(found.parked, row=None) == run
    assert [each.value for each in found.signals] == [bytes([number]) for number in range(5)]
    assert found.dropped == []
    assert store.read("third") == (None, [], [], [])
    assert store.parked("third") is None
    parked = store.parked(task_id)
    assert parked is not None and replace(parked, row=None) == run


def test_signals_are_counted_without_their_values_and_taken_one_by_one(store: WaitStore) -> None:
    sent = [add(store, "t", "a", bytes([number])) for number in range(25)]
    add(store, "t", "b", b"other")
    counted: list[Row] = []
    rows, ranged = store._rows, store._rows.range
    rows.range = lambda *a, **k: counted.extend(ranged(*a, **k)) or counted  # type: ignore[method-assign]
    try:
        assert store.before("t", sent[20]) == 20
    finally:
        del rows.range
    assert len(counted) == 20
    assert not any(row.values.get("data") for row in counted)
    assert store.before("t", sent[0]) == 0
    taken = {each.key for each in sent[:15]}
    first, gone = store.oldest("t", "a", taken)
    assert first is not None and first.value == bytes([15])
    assert {row.place.key for row in gone} == taken
    assert store.oldest("t", "a", {each.key for each in sent})[0] is None
    assert store.oldest("t", "c", ()) == (None, [])


def test_a_signal_sees_the_run_and_how_many_of_its_name_are_older(store: WaitStore) -> None:
    first = add(store, "t", "a", b"1")
    assert store.beside("t", first) == (None, 0)
    assert store.park(replace(RUN, id="t"), 1e11)
    second = add(store, "t", "a", b"2")
    add(store, "t", "b", b"other")
    third, beside = store.add_all(["t", "u"], "a", b"3")
    assert third is not None
    assert beside is not None
    for signal, older in ((first, 0), (second, 1), (third, 2)):
        found, before = store.beside("t", signal)
        assert (found and found.id, before) == ("t", older)
    assert store.beside("u", beside) == (None, 0)
    for number in range(20):
        add(store, "t", "a", bytes([number]))
    last = add(store, "t", "a", b"last")
    found, before = store.beside("t", last)
    assert (found and found.id, before) == ("t", 23), "more rows than one look reads"


def test_a_signal_whose_answer_was_lost_is_stored_once(
    make_rows: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    subject = make_rows()
    store = WaitStore(subject.store, MINE, PLAIN)
    subject.lose()
    signals = store.add_all(["t", "u"], "a", b"1")
    assert [each is not None for each in signals] == [True, True]
    for task_id in ("t", "u"):
        found, others = store.oldest(task_id, "a", ())
        assert (found and found.value, others) == (b"1", [])
    rows = subject.store.of(WAITS)
    make_all, taker = rows.write_all, WaitStore(subject.another, MINE, PLAIN)

    def taken_at_once(changes: Sequence[Change]) -> list[Row | None]:
        taker.remove([row for row in make_all(changes) if row is not None])
        return [None] * len(changes)

    monkeypatch.setattr(store, "_rows", rows)
    monkeypatch.setattr(rows, "write_all", taken_at_once)
    assert store.add_all(["v"], "a", b"1") == [None]
    for each in subject.at_end:
        each()


def test_a_later_hop_replaces_the_row_and_an_earlier_one_does_not(store: WaitStore) -> None:
    assert store.park(replace(RUN, hop=3), 1e10)
    assert store.park(replace(RUN, hop=3, waits=()), 1e10), "its settlement is repeated"
    assert not store.park(replace(RUN, hop=2), 1e10)
    assert store.park(replace(RUN, generation=1, hop=1), 1e10)
    found = store.read("t").parked
    assert found is not None and (found.generation, found.hop) == (1, 1)


def test_what_is_due_is_found_once_it_is(store: WaitStore) -> None:
    assert not store.any()
    store.park(RUN, store.now() + 600.0)
    assert store.any()
    assert store.due(10) == []
    signal = add(store, "t", "a", b"1")
    store.look_again(signal.row, store.now() - SOON)
    (found,) = store.due(10)
    assert store.task_of(found) == "t"
    store.look_again(found, store.now() + 600.0)
    assert store.due(10) == []
    store.remove([each.row for each in store.read("t").signals])
    assert store.read("t").signals == []


def test_all_runs_are_listed(store: WaitStore) -> None:
    for name in "abc":
        store.park(replace(RUN, id=name), 1e10)
    add(store, "d", "a", b"1")
    assert sorted(each.id for each in store.runs()) == ["a", "b", "c"]
    assert len(store.runs(limit=2)) == 2


def test_unsigned_signals_count_until_old_signatures_end_and_signed_ones_are_read_without_keys(
    rows: RowStore,
) -> None:
    signed, plain = WaitStore(rows, MINE, SIGNING), WaitStore(rows, MINE, PLAIN)
    add(plain, "t", "a", b"unsigned")
    add(signed, "t", "a", b"signed")
    for reader in (signed, plain):
        found = reader.read("t")
        assert sorted(each.value for each in found.signals) == [b"signed", b"unsigned"]
        assert found.dropped == []
        assert {reader.task_of(each.row) for each in found.signals} == {"t"}
    strict = WaitStore(rows, MINE, STRICT).read("t")
    assert [each.value for each in strict.signals] == [b"signed"]
    assert len(strict.dropped) == 1


def test_only_signed_signals_are_read_and_only_in_their_place(rows: RowStore) -> None:
    signed, plain = WaitStore(rows, MINE, STRICT), WaitStore(rows, MINE, PLAIN)
    other = WaitStore(rows, MINE, Codec(signing_keys=[b"another key of it"]))
    good = add(signed, "t", "a", b"good")
    add(plain, "t", "a", b"unsigned")
    add(other, "t", "a", b"other key")
    copied = add(plain, "u", "a", b"")
    changed = signed._rows.write(
        Change(copied.row.place, {**copied.row.values, "data": good.row.values["data"]}, copied.row)
    )
    assert changed is not None
    found = signed.read("t")
    assert [each.value for each in found.signals] == [b"good"]
    assert len(found.dropped) == 2
    assert signed.read("u").signals == []
    assert len(signed.read("u").dropped) == 1


def test_damaged_rows_are_dropped(store: WaitStore) -> None:
    store.park(RUN, 1e10)
    parked = store.read("t").parked
    assert parked is not None and parked.row is not None
    row = parked.row
    for data in (b"", b"\xc1", msgpack.packb([1, "u"]), msgpack.packb([0, "t"])):
        made = store._rows.write(Change(row.place, {**row.values, "data": data}, row))
        assert made is not None
        row = made
        assert store.read("t") == (None, [], [row], [])
        assert store.parked("t") is None
    assert store.park(RUN, 1e10), "it is written anew"
    assert store.read("t").parked is not None


def test_rows_of_a_newer_release_are_told_from_damaged_ones(store: WaitStore) -> None:
    store.park(RUN, 1e10)
    signal = add(store, "t", "a", b"1")
    parked = store.parked("t")
    assert parked is not None and parked.row is not None
    for row in (parked.row, signal.row):
        newer = msgpack.packb([VERSION + 1, "t", "what no one knows today"])
        made = store._rows.write(Change(row.place, {**row.values, "data": newer}, row))
        assert made is not None and store.is_newer(made)
        assert store.task_of(made) == "t"
    found = store.read("t")
    assert (found.parked, found.signals, found.dropped, len(found.newer)) == (None, [], [], 2)
    assert store.oldest("t", "a", ()) == (None, [])


def test_a_later_release_may_add_to_a_row(store: WaitStore) -> None:
    store.park(replace(RUN, timer=2**40), 1e10)
    parked = store.parked("t")
    assert parked is not None and parked.row is not None and parked.timer == 2**40
    row = parked.row
    more = [*msgpack.unpackb(row.values["data"]), {"more": 1}]
    assert store._rows.write(Change(row.place, {**row.values, "data": msgpack.packb(more)}, row))
    again = store.parked("t")
    assert again is not None and replace(again, row=row) == parked


def test_a_row_that_was_copied_to_another_task_is_of_none(store: WaitStore) -> None:
    store.park(RUN, 1e10)
    parked = store.parked("t")
    assert parked is not None and parked.row is not None
    place = store._place("u", "p")
    made = store._rows.write(Change(place, parked.row.values))
    assert made is not None and store.task_of(made) is None
    assert store.parked("u") is None


def test_rows_are_adopted_from_another_owner(rows: RowStore) -> None:
    theirs, mine = WaitStore(rows, THEIRS, PLAIN), WaitStore(rows, MINE, PLAIN)
    theirs.park(RUN, 1e10)
    add(theirs, "t", "a", b"1")
    assert mine.read("t") == (None, [], [], [])
    assert THEIRS in mine.owners()
    assert mine.adopt(THEIRS) == 2
    found = mine.read("t")
    assert found.parked is not None and len(found.signals) == 1
    assert theirs.read("t") == (None, [], [], [])


@pytest.mark.parametrize("behind", [[], [{"more": 1}]], ids=["of today", "of a later release"])
def test_an_adopted_run_has_no_timer(rows: RowStore, behind: list[object]) -> None:
    """Its number is that of another message at our broker, which must not be cancelled."""
    theirs, mine = WaitStore(rows, THEIRS, PLAIN), WaitStore(rows, MINE, PLAIN)
    theirs.park(replace(RUN, timer=2**40), 1e10)
    parked = theirs.parked("t")
    assert parked is not None and parked.row is not None
    data = msgpack.packb([*msgpack.unpackb(parked.row.values["data"]), *behind])
    row = theirs._rows.write(
        Change(parked.row.place, {**parked.row.values, "data": data}, parked.row)
    )
    assert row is not None and mine.adopt(THEIRS) == 1
    found = mine.parked("t")
    assert found is not None and found.row is not None
    assert replace(found, row=None) == RUN
    assert msgpack.unpackb(found.row.values["data"])[11:] == behind
