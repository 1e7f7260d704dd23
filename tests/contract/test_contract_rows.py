"""The port of rows, on SQLite, on Azure Tables, and on the model in memory."""

from __future__ import annotations

import math
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest
from rowstores import DUE, NUMBERED, PLAIN, SIMPLE, RowSubject

from aztask.address.owner import NO_OWNER, Owner
from aztask.errors import EncodeError
from aztask.queues.engine import Database
from aztask.stores.layout import SqlLayout, number_key
from aztask.stores.local import rows as localrows
from aztask.stores.local.rows import SqliteStore
from aztask.stores.rows import TOGETHER, Change, Place, Row, Rows
from aztask.support.clock import SYSTEM_CLOCK

MINE = Owner("servicebus://mine.servicebus.windows.net", "shop")
THEIRS = Owner("servicebus://theirs.servicebus.windows.net", "shop")
NOW = 1_800_000_000.0
ALL = {"text": "a", "data": b"b", "number": 1.5, "count": 3, "flag": True}
TEXTS = {
    "ascii": "plain-1.0:x",
    "forbidden": "a/b?c#d\\e%f'g",
    "umlauts": "\xe4" * 300,
    "controls": "a\0b\x1f\x7fc\n",
    "astral": "\U0001f600\uffff\U0010fffd",
    "escaped": "_2f_",
    "hash": "~" + "0" * 64,
    "spaces": " a  ",
}


@pytest.fixture
def rows(row_subject: RowSubject) -> Rows:
    return row_subject.store.of(PLAIN)


@pytest.fixture
def others(row_subject: RowSubject) -> Rows:
    return row_subject.another.of(PLAIN)


@pytest.fixture
def timed(row_subject: RowSubject) -> Rows:
    return row_subject.store.of(DUE)


def place(key: str = "k", partition: str = "p", owner: Owner = MINE) -> Place:
    return Place(owner, partition, key)


def held(key: str, owner: Owner = MINE) -> Place:
    return Place(owner.of_broker, "", key)


def values(rows: Rows, at: Place) -> dict[str, object] | None:
    (found,) = rows.get([at])
    return None if found is None else dict(found.values)


def made(row: Row | None) -> Row:
    assert row is not None
    return row


def full(**some: object) -> dict[str, object]:
    return {**dict.fromkeys(PLAIN.columns), **some}


# -- one row ---------------------------------------------------------------------------------


def test_a_row_is_inserted_replaced_and_deleted_as_it_was_read(rows: Rows, others: Rows) -> None:
    assert rows.get([place()]) == [None]
    first = made(rows.write(Change(place(), ALL)))
    assert others.get([place()]) == [first]
    assert others.write(Change(place(), full(text="again"))) is None, "it exists"
    second = made(others.write(Change(place(), full(text="b"), first)))
    assert rows.write(Change(place(), full(text="late"), first)) is None
    assert rows.write(Change(place(), None, first)) is None
    assert values(rows, place()) == full(text="b"), "what is not given is gone"
    assert rows.write(Change(place(), None, second)) == second
    assert rows.write(Change(place(), None, second)) is None
    assert others.get([place()]) == [None]


def test_a_row_of_a_former_time_is_not_the_current_one(rows: Rows) -> None:
    first = made(rows.write(Change(place(), full(text="1"))))
    rows.write(Change(place(), None, first))
    second = made(rows.write(Change(place(), full(text="2"))))
    assert rows.write(Change(place(), full(text="late"), first)) is None
    assert rows.write(Change(place(), None, first)) is None
    assert rows.get([place()]) == [second]


def test_a_row_is_put_whatever_is_there(rows: Rows, others: Rows) -> None:
    others.put(place(), full(text="1"))
    first = made(rows.get([place()])[0])
    rows.put(place(), full(count=5))
    assert values(others, place()) == full(count=5)
    assert others.write(Change(place(), ALL, first)) is None, "its tag is another one"


def test_pieces_are_merged_without_a_condition(rows: Rows, others: Rows) -> None:
    assert not rows.merge(place(), {"text": "x"}), "it does not exist"
    first = made(rows.write(Change(place(), ALL)))
    with ThreadPoolExecutor(2) as threads:
        for answer in threads.map(
            lambda one: one[0].merge(place(), one[1]),
            [(rows, {"text": "t"}), (others, {"count": 7, "data": b"new"})],
        ):
            assert answer
    assert values(rows, place()) == {**ALL, "text": "t", "count": 7, "data": b"new"}
    assert rows.write(Change(place(), ALL, first)) is None, "a write under an older tag fails"


def test_of_many_writers_one_succeeds_and_no_change_is_lost(rows: Rows, others: Rows) -> None:
    rows.write(Change(place(), full(data=b"")))

    def add(number: int) -> int:
        store = (rows, others)[number % 2]
        for tries in range(300):
            now = made(store.get([place()])[0])
            data = now.values["data"] + bytes([number])
            if store.write(Change(place(), full(data=data), now)) is not None:
                return tries
        raise AssertionError("it never succeeded")

    with ThreadPoolExecutor(4) as threads:
        list(threads.map(add, range(12)))
    assert sorted((values(rows, place()) or {})["data"]) == list(range(12))  # type: ignore[call-overload]


# -- values ----------------------------------------------------------------------------------


@pytest.mark.parametrize("name", sorted(TEXTS))
def test_texts_of_every_kind_are_places_and_values(rows: Rows, others: Rows, name: str) -> None:
    text = TEXTS[name]
    wanted = {
        place(key, part): full(text=key, data=part.encode())
        for key in (text, f"{text}x")
        for part in (text, f"{text}-")
    }
    for at, given in wanted.items():
        row = made(rows.write(Change(at, given)))
        assert made(others.get([at])[0]) == row
    assert [row and dict(row.values) for row in others.get(list(wanted))] == list(wanted.values())
    (listed,) = [
        r for r in others.of_owner(MINE) if dict(r.values) == full(text=text, data=text.encode())
    ]
    assert others.write(Change(listed.place, full(text="by its place"), listed)) is not None
    assert values(rows, place(text, text)) == full(text="by its place")


@pytest.mark.parametrize("number", [0.0, -0.0, 0.1 + 0.2, 1e308, 5e-324, math.inf, -math.inf, 7.0])
def test_numbers_are_read_as_they_were_written(rows: Rows, others: Rows, number: float) -> None:
    row = made(rows.write(Change(place(), full(number=number, count=-(2**31)))))
    found = made(others.get([place()])[0])
    assert found.values["number"] == number
    assert isinstance(found.values["number"], float)
    assert (found.values["count"], found.tag) == (-(2**31), row.tag)


@pytest.mark.parametrize("flag", [True, False, None])
def test_flags_are_read_as_they_were_written(rows: Rows, others: Rows, flag: bool | None) -> None:
    rows.write(Change(place(), full(flag=flag, data=b"")))
    found = values(others, place())
    assert found == full(flag=flag, data=b"")
    assert found is not None
    assert found["flag"] is flag


@pytest.mark.parametrize(
    "wrong", [{"number": math.nan}, {"text": "\ud800"}, {"count": 2**31}, {"count": -(2**31) - 1}]
)
def test_what_no_store_can_keep_is_refused_before_anything_changes(
    rows: Rows, wrong: dict[str, object]
) -> None:
    before = made(rows.write(Change(place(), ALL)))
    for attempt in (
        lambda: rows.write(Change(place(), full(**wrong), before)),
        lambda: rows.write_all([Change(place("new"), ALL), Change(place("x"), full(**wrong))]),
        lambda: rows.together([Change(place(), ALL, before), Change(place("x"), full(**wrong))]),
        lambda: rows.put(place(), full(**wrong)),
        lambda: rows.merge(place(), wrong),
        lambda: rows.write(Change(place("\udfff"), ALL)),
    ):
        with pytest.raises(EncodeError):
            attempt()
    assert rows.get([place(), place("x")]) == [before, None]


@pytest.mark.parametrize("size", [1, 61_440, 61_441, 200_000, 800_000])
def test_a_value_may_be_larger_than_a_property(rows: Rows, others: Rows, size: int) -> None:
    data = bytes(range(256)) * (size // 256 + 1)
    row = made(rows.write(Change(place(), full(data=data[:size], text="x"))))
    assert values(others, place()) == full(data=data[:size], text="x")
    shorter = made(others.write(Change(place(), full(data=b"short"), row)))
    assert values(rows, place()) == full(data=b"short")
    if size <= 200_000:  # an Azurite table takes no larger piece
        assert others.merge(place(), {"data": data[:size]})
        assert values(rows, place()) == full(data=data[:size])
        assert rows.write(Change(place(), ALL, shorter)) is None


def test_what_does_not_fit_is_kept_or_refused_before_anything_changes(rows: Rows) -> None:
    before = made(rows.write(Change(place(), ALL)))
    large = full(data=b"x" * 1_100_000)
    try:
        after = made(rows.write(Change(place(), large, before)))
    except EncodeError:
        assert rows.get([place()]) == [before]
    else:
        assert values(rows, place()) == large
        assert rows.write(Change(place(), None, after)) is not None


# -- several rows ----------------------------------------------------------------------------


def test_rows_of_many_partitions_are_read_and_written_in_one_call(rows: Rows, others: Rows) -> None:
    places = [place(f"k{n}", f"p{n % 7}") for n in range(20)]
    assert others.write(Change(places[3], full(text="there"))) is not None
    answers = rows.write_all([Change(each, full(count=n)) for n, each in enumerate(places)])
    assert [answer is None for answer in answers] == [n == 3 for n in range(20)], "each alone"
    found = others.get([*places, place("missing")])
    assert [row and row.values["count"] for row in found] == [
        *(None if n == 3 else n for n in range(20)),
        None,
    ]
    assert [row and row.tag for row in found[:3]] == [row and row.tag for row in answers[:3]]
    assert rows.write_all([]) == []
    assert rows.get([]) == []


def test_changes_of_one_partition_are_made_together_or_not_at_all(rows: Rows, others: Rows) -> None:
    old, gone = (made(rows.write(Change(place(key), full(text=key)))) for key in ("old", "gone"))
    changes = [
        Change(place("new"), full(text="new")),
        Change(place("old"), full(text="changed"), old),
        Change(place("gone"), None, gone),
    ]
    for conflict in (
        Change(place("other"), full(), old._replace(place=place("other"))),
        Change(place("third"), None, gone._replace(place=place("third"))),
    ):
        assert rows.together([*changes, conflict]) is None
        assert others.get([place("new"), place("old"), place("gone")]) == [None, old, gone]
    there = made(rows.write(Change(place("there"), full())))
    assert rows.together([*changes, Change(place("there"), full(text="x"))]) is None
    after = rows.together([*changes, Change(place("there"), full(text="x"), there)])
    assert after is not None
    assert others.get([place(key) for key in ("new", "old", "gone", "there")]) == [
        after[0],
        after[1],
        None,
        after[3],
    ]
    assert after[2] == gone


def test_a_transaction_has_its_limits(rows: Rows) -> None:
    most = [Change(place(f"k{n}"), full(count=n)) for n in range(TOGETHER)]
    made_now = rows.together(most)
    assert made_now is not None
    assert [row.values["count"] for row in rows.range(MINE, "p")][:3] == [0, 1, 10]
    for wrong in (
        [*most, Change(place("more"), full())],
        [Change(place("a"), full()), Change(place("b", "q"), full())],
        [Change(place("a"), full()), Change(place("b", owner=THEIRS), full())],
        [Change(place("a"), full()), Change(place("a"), full())],
    ):
        with pytest.raises(ValueError, match=r"together|transaction"):
            rows.together(wrong)
    assert rows.get([place("a"), place("more")]) == [None, None]


def test_a_range_is_in_order_and_within_its_partition(rows: Rows) -> None:
    keys = ["a", "a-1", "a.1", "b", "b:2", "c1", "c10", "c2"]
    for key in reversed(keys):
        rows.write(Change(place(key), full(text=key)))
    rows.write(Change(place("b", "p2"), full(text="other partition")))
    rows.write(Change(place("b", owner=THEIRS), full(text="other owner")))
    assert [row.place for row in rows.range(MINE, "p")] == [place(key) for key in sorted(keys)]
    assert [row.values["text"] for row in rows.range(MINE, "p", "a-1", "c1")] == [
        "a-1",
        "a.1",
        "b",
        "b:2",
    ]
    assert [row.values["text"] for row in rows.range(MINE, "p", "b", limit=2)] == ["b", "b:2"]
    assert rows.range(MINE, "nothing") == []


def test_rows_of_an_owner_are_found_by_prefix_and_age(rows: Rows, row_subject: RowSubject) -> None:
    for part in ("limit-a", "limit-b", "other", "limit"):
        rows.write(Change(place(partition=part), full(text=part)))
    rows.write(Change(place(partition="limit-a", owner=THEIRS), full(text="theirs")))
    now = row_subject.store.time().at

    def found(prefix: str, before: float | None = None) -> list[object]:
        return sorted(str(r.values["text"]) for r in rows.of_owner(MINE, prefix, before))

    assert found("") == ["limit", "limit-a", "limit-b", "other"]
    assert found("limit-") == ["limit-a", "limit-b"]
    assert found("limit-", now - 60.0) == []
    assert found("limit-", now + 60.0) == ["limit-a", "limit-b"]
    for row in rows.of_owner(MINE, "limit-"):
        assert rows.write(Change(row.place, None, row)) is not None
    assert found("") == ["limit", "other"]


# -- lost answers ----------------------------------------------------------------------------


def test_a_writer_recognises_its_own_write_after_a_lost_answer(
    row_subject: RowSubject, rows: Rows, others: Rows
) -> None:
    row_subject.lose()
    first = made(rows.write(Change(place(), ALL)))
    assert others.get([place()]) == [first]
    row_subject.lose()
    second = made(rows.write(Change(place(), full(text="2", number=0.1), first)))
    assert others.get([place()]) == [second]
    row_subject.lose()
    assert rows.write(Change(place(), None, second)) == second
    assert others.get([place()]) == [None]
    row_subject.lose()
    assert rows.write_all([Change(place(), ALL), Change(place("b"), full())]).count(None) == 0
    row_subject.lose()
    rows.put(place(), full(text="put"))
    row_subject.lose()
    assert rows.merge(place(), {"count": 9})
    assert values(others, place()) == full(text="put", count=9)


def test_a_transaction_is_recognised_after_a_lost_answer(
    row_subject: RowSubject, rows: Rows, others: Rows
) -> None:
    old, gone = (made(rows.write(Change(place(key), full(text=key)))) for key in ("old", "gone"))
    row_subject.lose()
    after = rows.together([
        Change(place("new"), full(text="new")),
        Change(place("old"), full(text="changed"), old),
        Change(place("gone"), None, gone),
    ])  # fmt: skip
    assert after is not None
    assert others.get([place("new"), place("old"), place("gone")]) == [after[0], after[1], None]


def test_a_write_of_another_one_is_not_taken_for_ours_after_a_lost_answer(
    row_subject: RowSubject, rows: Rows, others: Rows
) -> None:
    theirs = made(others.write(Change(place(), full(text="theirs"))))
    row_subject.lose()
    assert rows.write(Change(place(), full(text="mine"))) is None
    row_subject.lose()
    assert (
        rows.write(
            Change(
                place(),
                full(text="mine"),
                theirs._replace(tag=made(others.write(Change(place("x"), full()))).tag),
            )
        )
        is None
    )
    assert others.get([place()]) == [theirs]


def test_a_due_row_is_recognised_after_a_lost_answer(row_subject: RowSubject, timed: Rows) -> None:
    row_subject.lose()
    first = made(timed.write(Change(held("a"), {"due": NOW, "data": b"1"})))
    row_subject.lose()
    second = made(timed.write(Change(held("a"), {"due": NOW + 5, "data": b"2"}, first)))
    assert timed.due(MINE.of_broker, NOW + 1, 9) == []
    assert timed.due(MINE.of_broker, NOW + 6, 9) == [held("a")]
    row_subject.lose()
    assert timed.write(Change(held("a"), None, second)) == second
    assert timed.due(MINE.of_broker, NOW + 6, 9) == []


# -- due times -------------------------------------------------------------------------------


def test_due_rows_come_in_order(row_subject: RowSubject, timed: Rows) -> None:
    others = row_subject.another.of(DUE)
    for number, key in enumerate(["c", "a/?", "b", "d"]):
        timed.write(Change(held(key), {"due": NOW + number, "data": b"x"}))
    timed.write(Change(held("never"), {"due": math.inf, "data": b"x"}))
    timed.write(Change(held("always"), {"due": -math.inf, "data": b"x"}))
    timed.write(Change(held("theirs", THEIRS), {"due": NOW, "data": b"x"}))

    def due(before: float, limit: int = 9) -> list[str]:
        return [each.key for each in others.due(MINE.of_broker, before, limit)]

    assert due(NOW + 2.5) == ["always", "c", "a/?", "b"]
    assert due(NOW + 2.5, 2) == ["always", "c"]
    found = made(others.get([held("c")])[0])
    later = made(timed.write(Change(held("c"), {"due": NOW + 100, "data": b"y"}, found)))
    assert due(NOW + 2.5) == ["always", "a/?", "b"]
    assert others.write(Change(held("c"), {"due": NOW + 100, "data": b"z"}, later)) is not None
    assert due(NOW + 1000) == ["always", "a/?", "b", "d", "c"]


# -- rows with numbers, and without versions --------------------------------------------------


def numbered(text: str, data: bytes = b"x") -> dict[str, object]:
    return {"text": text, "more": "m", "data": data}


def at(key: str, owner: Owner = MINE, partition: str = "p/q") -> Place:
    return Place(owner.of_broker, partition, key)


def test_rows_with_numbers_are_in_the_order_in_which_they_were_made(
    row_subject: RowSubject, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(localrows, "_PAGE", 2)
    rows, others = row_subject.store.of(NUMBERED), row_subject.another.of(NUMBERED)
    names = ["c", "a/?", "b", "\xe4" * 300]
    for name in names:
        rows.write(Change(at(name), numbered(name, b"y" * 70_000)))
        time.sleep(0.002)  # clocks of machines may be less exact
    assert (
        rows.write_all([Change(at("b"), numbered("again")), Change(at("d"), numbered("d"))])[0]
        is None
    )
    others.write(Change(at("a", THEIRS), numbered("theirs")))
    others.write(Change(at("b", partition="other"), numbered("other")))
    found = others.range(MINE.of_broker, "p/q")
    assert [row.place for row in found] == [at(name) for name in (*names, "d")]
    assert [row.values["text"] for row in found] == [*names, "d"]
    assert {row.values["more"] for row in found} == {"m"}
    assert {len(row.values["data"]) for row in found[:4]} == {70_000}
    numbers = [row.values["number"] for row in found]
    assert numbers == sorted(set(numbers))
    second, last = number_key(numbers[1]), number_key(numbers[3])
    short = rows.range(MINE.of_broker, "p/q", second, last, short=True)
    assert [row.values for row in short] == [{**row.values, "data": None} for row in found[1:3]]
    assert rows.range(MINE.of_broker, "p/q", second, limit=1) == found[1:2]
    assert rows.get([at("b"), at("missing")]) == [found[2], None]
    every = [row.values["text"] for row in rows.of_owner(MINE.of_broker)]
    assert sorted(map(str, every)) == sorted([*names, "d", "other"])
    assert [text for text in every if text != "other"] == [*names, "d"]


def test_rows_with_numbers_are_deleted_by_key_or_as_they_were_read(row_subject: RowSubject) -> None:
    rows, others = row_subject.store.of(NUMBERED), row_subject.another.of(NUMBERED)
    for owner in (MINE, NO_OWNER):
        for name in "abc":
            others.write(Change(at(name, owner), numbered(name)))
        rows.remove([at("a", owner), at("missing", owner)])
        (first, second) = rows.range(owner.of_broker, "p/q", short=True)
        assert rows.write(Change(first.place, None, first)) == first
        assert rows.write(Change(first.place, None, first)) is None
        assert others.range(owner.of_broker, "p/q", short=True) == [second]
        made(rows.write(Change(at("b", owner), numbered("new"))))
        again = others.range(owner.of_broker, "p/q")
        assert [row.values["text"] for row in again] == ["c", "new"]
    assert rows.owners() == {MINE.of_broker, NO_OWNER}


def test_a_row_with_a_number_is_made_once_although_an_answer_is_lost(
    row_subject: RowSubject,
) -> None:
    rows, others = row_subject.store.of(NUMBERED), row_subject.another.of(NUMBERED)
    row_subject.lose()
    made(rows.write(Change(at("a"), numbered("mine"))))
    (first,) = others.range(MINE.of_broker, "p/q")
    assert first.values["text"] == "mine"
    row_subject.lose()
    assert rows.write(Change(at("a"), numbered("mine"))) is None
    row_subject.lose()
    assert rows.write(Change(first.place, None, first)) == first
    assert others.range(MINE.of_broker, "p/q") == []
    others.write(Change(at("b"), numbered("b")))
    row_subject.lose()
    rows.remove([at("b")])
    assert others.get([at("b")]) == [None]


def test_rows_without_versions_are_put_merged_and_removed(row_subject: RowSubject) -> None:
    rows, others = row_subject.store.of(SIMPLE), row_subject.another.of(SIMPLE)
    here = at("", partition="a/b")
    rows.remove([here])
    assert made(rows.write(Change(here, {"number": 1.0}))).values == {"number": 1.0}
    rows.put(here, {"number": 2.0})
    assert values(others, here) == {"number": 2.0}
    assert rows.merge(here, {"number": 3.0})
    assert [row.values for row in others.of_owner(MINE.of_broker)] == [{"number": 3.0}]
    rows.remove([row.place for row in rows.of_owner(MINE.of_broker)])
    assert others.get([here]) == [None]


# -- owners ----------------------------------------------------------------------------------


def test_owners_do_not_see_each_others_rows(rows: Rows) -> None:
    assert rows.owners() == set()
    for owner in (MINE, THEIRS, NO_OWNER, Owner(MINE.broker, "billing")):
        assert rows.write(Change(place(owner=owner), full(text=str(owner)))) is not None
    assert rows.owners() == {MINE, THEIRS, NO_OWNER, Owner(MINE.broker, "billing")}
    for owner in (MINE, THEIRS, NO_OWNER):
        assert values(rows, place(owner=owner)) == full(text=str(owner))
        assert [row.values["text"] for row in rows.of_owner(owner)] == [str(owner)]
        assert [row.place for row in rows.range(owner, "p")] == [place(owner=owner)]


def test_a_row_without_an_owner_stands_in_for_an_own_one(row_subject: RowSubject) -> None:
    former = row_subject.another.of(DUE)
    old = made(former.write(Change(held("a", NO_OWNER), {"due": NOW, "data": b"old"})))
    mine = row_subject.store.of(DUE)
    assert mine.get([held("a")]) == [old]
    assert mine.write(Change(held("a"), {"due": NOW, "data": b"new"})) is None
    changed = made(mine.write(Change(old.place, {"due": NOW, "data": b"changed"}, old)))
    assert former.get([held("a", NO_OWNER)]) == [changed]
    beside = made(mine.write(Change(held("a"), {"due": NOW, "data": b"own"}, beside=True)))
    assert mine.get([held("a")]) == [beside]
    assert mine.owners() == {MINE.of_broker, NO_OWNER}
    assert mine.due(MINE.of_broker, NOW + 1, 9) == [held("a")]


# -- the store -------------------------------------------------------------------------------


def test_the_stores_clock_moves_on_and_is_bounded(row_subject: RowSubject) -> None:
    first = row_subject.store.time()
    time.sleep(0.05)
    second = row_subject.store.time()
    assert first.earliest <= first.latest <= second.earliest <= second.latest
    passed = second.at - first.at
    assert second.earliest - first.latest - 0.01 <= passed <= second.latest - first.earliest + 0.01
    before = time.time()
    assert before - 2.0 < row_subject.store.now() <= time.time()


def test_in_a_file_calls_join_the_transaction_around_them(tmp_path: object) -> None:
    databases = [Database(f"{tmp_path}/rows.db") for _ in range(2)]
    mine, theirs = (SqliteStore(each, SYSTEM_CLOCK).of(PLAIN) for each in databases)
    with pytest.raises(RuntimeError), databases[0].transaction() as connection:
        connection.execute("CREATE TABLE beside (x)")
        first = made(mine.write(Change(place(), ALL)))
        conflict = [Change(place("a"), ALL), Change(place(), full(), first._replace(tag="1"))]
        assert mine.together(conflict) is None, "only this is undone"
        assert mine.get([place(), place("a")]) == [first, None]
        assert theirs.get([place()]) == [None]
        raise RuntimeError
    assert theirs.get([place()]) == [None]
    with databases[0].transaction():
        mine.write(Change(place(), ALL))
        mine.together([Change(place("a"), ALL), Change(place("b"), ALL)])
    assert len(theirs.range(MINE, "p")) == 3
    for each in databases:
        each.close()


@pytest.mark.parametrize("name", ["a b", "x; DROP TABLE y", "a-b", "\xe4", "1a"])
def test_a_layout_has_identifiers_alone(name: str) -> None:
    """Statements are built from its names."""
    for wrong in ({"owned": name}, {"unowned": name}, {"key": name}, {"partition": name},
                  {"version": name}, {"written": name}, {"guard": name}):  # fmt: skip
        with pytest.raises(ValueError, match="identifier"):
            SqlLayout(**{"owned": "a", "unowned": "b", **wrong})
    with pytest.raises(ValueError, match="identifier"):
        replace(PLAIN, columns={name: str})
