"""Bits, decisions and values: what they mean, how they are stored, and what is damaged."""

from dataclasses import replace

import msgpack
import pytest

from aztask.stores.records.base import State
from aztask.stores.records.damage import Damaged
from aztask.workflows.bits import (
    FAILURES,
    NIL,
    Bit,
    Decision,
    Failure,
    FullRow,
    Join,
    MemberEnd,
    OfJoin,
    ParkedValue,
    decided,
)
from aztask.workflows.packing import (
    TEXT,
    bit_of,
    decision_of,
    is_plain,
    pack_join,
    pack_late,
    pack_values,
    packed_bit,
    packed_decision,
    read_join,
    read_values,
)
from aztask.workflows.plan import JoinSlot, Layout
from aztask.workflows.rows import empty_row, read_row

FAILED = Failure(3, State.FAILED, "ValueError", "no")
CANCELLED = Failure(4, State.CANCELLED, "Cancelled", "stopped")
DECISION = Decision(State.FAILED, 2, 7.5, 1, (FAILED,), ("row-1-0-0",), "me")
BIT = Bit(State.SUCCEEDED, 3, 1, 2, b"\x01")


def end(member=0, state=State.SUCCEEDED, *, node=3, generation=0, value=b"\x01", failures=()):
    failures = failures or (() if state is State.SUCCEEDED else (Failure(node, state),))
    return MemberEnd(JoinSlot(1, member), 3, node, generation, state, value, failures)


# -- the decision ----------------------------------------------------------------------------------


def decision(*rows, passes_errors=False, documents=False):
    return decided(rows, passes_errors=passes_errors, at=7.5, documents=documents, by="me")


def test_a_join_whose_members_all_succeeded_has_succeeded():
    made = decision(FullRow(1, 0, "a"), FullRow(2, 0, "b"), documents=True)
    assert made == Decision(State.SUCCEEDED, 3, 7.5, 0, (), ("a", "b"), "me")
    assert decision(FullRow(0, 0, "a")).values == ()


def test_a_join_with_a_failed_member_has_failed():
    made = decision(FullRow(0, 1, "", [FAILED]), FullRow(0, 1, "", [CANCELLED]))
    assert (made.state, made.failed, made.failures) == (State.FAILED, 2, (FAILED, CANCELLED))


def test_a_join_whose_failures_are_all_cancellations_is_cancelled():
    made = decision(FullRow(0, 0, ""), FullRow(0, 2, "", [CANCELLED, CANCELLED]))
    assert made.state is State.CANCELLED


def test_a_join_that_passes_errors_succeeds_whatever_its_members_did():
    made = decision(FullRow(0, 1, "", [FAILED]), passes_errors=True)
    assert (made.state, made.failed, made.failures) == (State.SUCCEEDED, 1, (FAILED,))


def test_a_decision_lists_the_first_failures_and_counts_all():
    rows = [FullRow(0, 15, "", [replace(FAILED, node=15 * n + k) for k in range(15)])
            for n in range(2)]  # fmt: skip
    made = decision(*rows)
    assert made.failed == 30
    assert [each.node for each in made.failures] == list(range(FAILURES))


def test_a_row_of_a_large_join_counts_if_it_is_newer():
    join = Join([None, None])
    assert join.set(0, FullRow(1, 1, "old"))
    join.decision = DECISION
    assert not join.set(0, FullRow(1, 0, "the same revision"))
    assert not join.set(0, FullRow(0, 0, "older"))
    assert join.decision is DECISION
    assert join.set(0, FullRow(2, 0, "newer"))
    assert (join.rows[0].values, join.decision) == ("newer", None)


def test_a_join_that_has_succeeded_is_frozen():
    join = Join([FullRow(0, 0, "a")], replace(DECISION, state=State.SUCCEEDED))
    assert not join.set(0, FullRow(5, 1, "b"))
    assert join.rows[0].values == "a"


# -- rows ------------------------------------------------------------------------------------------


def test_a_row_counts_its_members_and_its_bytes():
    row = empty_row(3)
    assert (row.ended, row.left, row.full, row.inline_bytes) == (0, 3, False, 0)
    assert row.set(0, end(0, value=b"12345"), b"12345")
    assert row.set(1, end(1, State.FAILED), NIL)
    assert (row.ended, row.left, row.full, row.inline_bytes) == (2, 1, False, 5)
    assert row.set(2, end(2), ParkedValue("values", 4))
    assert (row.full, row.inline_bytes) == (True, 5)
    assert row.bits == [
        Bit(State.SUCCEEDED, 3, 0, 0, b"12345"),
        Bit(State.FAILED, 3, 0, 0, None, (Failure(3, State.FAILED),)),
        Bit(State.SUCCEEDED, 3, 0, 0, ParkedValue("values", 4)),
    ]
    assert read_row(row.pack(), 3).bits == row.bits
    assert read_row(row.pack(), 3).inline_bytes == 5


def test_only_a_later_version_changes_a_bit():
    row = empty_row(1)
    row.set(0, end(value=b"first", generation=1), b"first")
    for node, generation in ((3, 1), (3, 0), (2, 9)):
        assert not row.set(0, end(node=node, generation=generation, value=b"x"), b"x")
    assert row.set(0, end(generation=2, value=b"second one"), b"second one")
    assert row.bit(0) == Bit(State.SUCCEEDED, 3, 2, 1, b"second one")
    assert row.inline_bytes == 10
    assert row.set(0, end(node=4, value=b"3"), b"3")
    assert (row.bit(0).revision, row.inline_bytes) == (2, 1)


def test_a_bit_that_is_set_anew_takes_the_decision_back_unless_the_join_succeeded():
    row = empty_row(1)
    row.set(0, end(state=State.FAILED), NIL)
    row.decision = DECISION
    assert row.set(0, end(generation=1), b"\x01")
    assert row.decision is None
    row.decision = replace(DECISION, state=State.SUCCEEDED)
    assert not row.set(0, end(generation=2), b"\x02")
    assert row.decision is not None


def test_a_full_row_sums_up_its_bits():
    row = empty_row(4)
    row.set(0, end(0), b"\x01")
    row.set(1, end(1, State.FAILED, failures=(FAILED, CANCELLED)), NIL)
    row.set(2, end(2, State.FAILED), NIL)
    row.set(2, end(2, generation=1), b"\x01")
    row.set(3, end(3, State.EXPIRED), NIL)
    expired = Failure(3, State.EXPIRED)
    assert row.as_full("doc") == FullRow(1, 2, "doc", [FAILED, CANCELLED, expired])


def test_plain_values_are_those_of_a_row_without_failures_and_parked_values():
    row = empty_row(2)
    row.set(0, end(0, value=b"\x01"), b"\x01")
    assert row.plain_values() is None
    row.set(1, end(1, value=b"\x02"), b"\x02")
    assert read_values(row.plain_values()) == [(b"\x01", None), (b"\x02", None)]
    row.set(1, end(1, generation=1), ParkedValue("values", 0))
    assert row.plain_values() is None


def packed_row(*parts):
    return msgpack.packb(list(parts))


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"\xc1",
        msgpack.packb({"a": 1}),
        packed_row([None], None),
        packed_row([None], None, 0, "more"),
        packed_row({}, None, 0),
        packed_row({"a": 1}, None, 0),
        packed_row("x", None, 0),
        packed_row(b"x", None, 0),
        msgpack.packb(5),
        msgpack.packb(None),
        msgpack.packb("text"),
        packed_row([], None, 0),
        packed_row([None, None], None, 0),
        packed_row([None], None, -1),
        packed_row([None], None, True),
        packed_row([None], [1], 0),
    ],
    ids=repr,
)
def test_a_damaged_row_is_refused(data):
    with pytest.raises(Damaged):
        read_row(data, 1)


# -- bytes -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "bit",
    [
        BIT,
        Bit(State.SUCCEEDED, 3, 1, 0, b"\x01"),
        Bit(State.SUCCEEDED, 3, 0, 0, ParkedValue("values", 4)),
        Bit(State.SUCCEEDED, 3, 0, 0, OfJoin(9)),
        Bit(State.FAILED, 3, 0, 1, None, (FAILED, CANCELLED)),
        Bit(State.EXPIRED, 3, 0, 1, None, (Failure(3, State.EXPIRED),)),
        None,
    ],
    ids=str,
)
def test_a_bit_is_read_as_it_was_packed(bit):
    assert bit_of(msgpack.unpackb(msgpack.packb(packed_bit(bit)))) == bit


def test_a_plain_bit_is_one_that_succeeded_once_with_a_value_in_the_row():
    plain = packed_bit(Bit(State.SUCCEEDED, 3, 1, 0, b"\x01"))
    assert plain == [1, 3, 1, 0, b"\x01"]
    assert is_plain(plain)
    for other in (
        BIT,
        Bit(State.FAILED, 3, 1, 0, b"\x01"),
        Bit(State.SUCCEEDED, 3, 1, 0, OfJoin(1)),
        Bit(State.SUCCEEDED, 3, 1, 0, b"\x01", (FAILED,)),
        None,
    ):
        assert not is_plain(packed_bit(other))


@pytest.mark.parametrize(
    "packed",
    [
        [],
        [1, 3, 0, 0],
        [1, 3, 0, 0, b"", [], "more"],
        {"a": 1},
        [9, 3, 0, 0, b""],
        [True, 3, 0, 0, b""],
        [1, -1, 0, 0, b""],
        [1, 3, "0", 0, b""],
        [1, 3, 0, 0.5, b""],
        [1, 3, 0, 0, "text"],
        [1, 3, 0, 0, ["values"]],
        [1, 3, 0, 0, [5, 0]],
        [1, 3, 0, 0, ["values", -1]],
        [1, 3, 0, 0, ["values", 0, 1]],
        [2, 3, 0, 0, None, "no list"],
        [2, 3, 0, 0, None, [[3, 2, "E"]]],
        [2, 3, 0, 0, None, [[3, 2, "E", 5]]],
        [2, 3, 0, 0, None, [[3, 7, "E", ""]]],
    ],
    ids=repr,
)
def test_a_damaged_bit_is_refused(packed):
    with pytest.raises(Damaged):
        bit_of(packed)


def test_a_decision_is_read_as_it_was_packed():
    assert decision_of(msgpack.unpackb(msgpack.packb(packed_decision(DECISION)))) == DECISION
    assert decision_of(None) is None


@pytest.mark.parametrize(
    ("place", "value"),
    [(0, 0), (1, -1), (2, 7), (2, None), (3, "1"), (4, None), (5, None), (5, [7]), (6, None)],
)
def test_a_damaged_decision_is_refused(place, value):
    packed = msgpack.unpackb(msgpack.packb(packed_decision(DECISION)))
    with pytest.raises(Damaged):
        decision_of([*packed[:place], value, *packed[place + 1 :]])
    with pytest.raises(Damaged):
        decision_of(packed[:-1])


def test_the_text_of_an_error_is_cut():
    long = replace(FAILED, error="x" * 2 * TEXT)
    bit = bit_of(packed_bit(Bit(State.FAILED, 3, 0, 0, None, (long,))))
    assert bit.failures[0].error == "x" * TEXT


def test_a_join_is_read_as_it_was_packed():
    join = Join([FullRow(2, 1, "row-1-0-2", [FAILED]), None], DECISION)
    assert read_join(pack_join(join), 2) == join
    assert read_join(pack_join(Join([None])), 1) == Join([None])


@pytest.mark.parametrize(
    "parts",
    [
        [[None]],
        [[None], None, 5],
        [{}, None],
        [[], None],
        [[None, None], None],
        [[[1, 0, ""]], None],
    ],
    ids=repr,
)
def test_a_damaged_join_is_refused(parts):
    with pytest.raises(Damaged):
        read_join(msgpack.packb(parts), 1)


def test_values_are_read_as_they_were_packed():
    values = [(b"\x01", None), (ParkedValue("values", 4), None), (OfJoin(2), None), (None, FAILED)]
    assert read_values(pack_values(values)) == values


@pytest.mark.parametrize("parts", [[1], [[b""]], [[b"", None, 5]], [["text", None]]], ids=repr)
def test_damaged_values_are_refused(parts):
    with pytest.raises(Damaged):
        read_values(msgpack.packb(parts))


# -- what is not said, and the forms of every release ----------------------------------------------


def test_what_is_not_said_of_an_end_a_failure_and_a_decision():
    assert Failure(1, State.FAILED) == Failure(1, State.FAILED, "", "")
    plain = MemberEnd(JoinSlot(1, 0), 3, 2, 0, State.SUCCEEDED)
    assert plain == MemberEnd(
        JoinSlot(1, 0), 3, 2, 0, State.SUCCEEDED, NIL, (), False, False, False
    )
    assert Decision(State.FAILED, 1, 2.0) == Decision(State.FAILED, 1, 2.0, 0, (), (), "")
    assert Bit(State.FAILED, 1, 2, 3) == Bit(State.FAILED, 1, 2, 3, None, ())
    assert (FullRow(1, 0, "v").failures, Join([None]).decision) == ([], None)
    assert (NIL, FAILURES) == (b"\xc0", 20)


def test_an_end_knows_where_its_bit_is():
    plain = MemberEnd(JoinSlot(1, 0), 300, 2, 0, State.SUCCEEDED)
    assert plain.layout == Layout(300)
    assert plain._replace(blocked=True).layout == Layout(300, True)


def test_states_have_the_numbers_of_every_release():
    states = (State.SUCCEEDED, State.FAILED, State.CANCELLED, State.EXPIRED)
    codes = [packed_bit(Bit(state, 3, 0, 0))[0] for state in states]
    assert codes == [1, 2, 3, 4]
    assert [bit_of([code, 3, 0, 0, None]).state for code in codes] == list(states)


def test_documents_have_the_forms_of_every_release():
    failure = [3, 2, "ValueError", "no"]
    decision = [2, 2, 7.5, 1, [failure], ["row-1-0-0"], "me"]
    assert msgpack.unpackb(msgpack.packb(packed_decision(DECISION))) == decision
    join = Join([FullRow(2, 1, "row-1-0-2", [FAILED]), None], DECISION)
    assert msgpack.unpackb(pack_join(join)) == [[[2, 1, "row-1-0-2", [failure]], None], decision]
    assert msgpack.unpackb(pack_join(Join([None]))) == [[None], None]
    values = [(b"\x01", None), (ParkedValue("values", 4), None), (OfJoin(2), None), (None, FAILED)]
    assert msgpack.unpackb(pack_values(values)) == [
        [b"\x01", None], [["values", 4], None], [2, None], [None, failure],
    ]  # fmt: skip
    given = end(1, State.FAILED, failures=(FAILED,))
    assert msgpack.unpackb(pack_late(1, given)) == [1, [2, 3, 0, 0, None, [failure]]]
    assert msgpack.unpackb(pack_late(0, end())) == [0, [1, 3, 0, 0, b"\x01"]]
    row = empty_row(2)
    row.set(0, end(value=b"12"), b"12")
    row.decision = DECISION
    assert msgpack.unpackb(row.pack()) == [[[1, 3, 0, 0, b"12"], None], decision, 2]


def test_the_text_of_an_error_is_cut_at_500_characters():
    for length in (499, 500, 501):
        long = replace(FAILED, error="x" * length)
        bit = bit_of(packed_bit(Bit(State.FAILED, 3, 0, 0, None, (long,))))
        assert len(bit.failures[0].error) == min(length, 500)


def test_a_text_that_is_no_unicode_is_kept():
    odd = replace(FAILED, error="file \udcff")
    packed = [[None, [3, 2, "ValueError", "file \udcff"]]]
    data = msgpack.packb(packed, unicode_errors="surrogatepass")
    assert read_values(data) == [(None, odd)]


def test_an_appended_bit_has_no_value_unless_it_succeeded_and_few_failures():
    many = tuple(Failure(n, State.FAILED) for n in range(25))
    piece = pack_late(0, end(state=State.FAILED, value=b"\x07", failures=many))
    row = read_row(empty_row(1).pack() + piece, 1)
    (bit,) = row.bits
    assert (bit.value, len(bit.failures), row.inline_bytes) == (None, 20, 0)
    row = empty_row(1)
    row.set(0, end(state=State.FAILED, failures=many), NIL)
    assert len(row.bit(0).failures) == 20


def test_appended_bits_count_in_the_order_of_their_versions():
    pieces = [
        pack_late(0, end(generation=2, value=b"\x02")),
        pack_late(1, end(1, node=4, value=b"\x05")),
        pack_late(0, end(generation=1, value=b"\x01")),
        pack_late(1, end(1, node=3, generation=9, value=b"\x04")),
        pack_late(0, end(generation=2, value=b"\x02")),
    ]
    for given in (pieces, pieces[::-1]):
        row = read_row(empty_row(2).pack() + b"".join(given), 2)
        first, second = row.bits
        assert (first.generation, first.revision, first.value) == (2, 1, b"\x02")
        assert (second.node, second.revision, second.value) == (4, 1, b"\x05")
        assert row.outdated
    assert not read_row(empty_row(2).pack(), 2).outdated


@pytest.mark.parametrize(
    "piece",
    [
        [0, [1, 3, 0, 0, b""], 5],
        [0],
        [-1, [1, 3, 0, 0, b""]],
        [2, [1, 3, 0, 0, b""]],
        [True, [1, 3, 0, 0, b""]],
        [0, None],
        {"a": 1},
    ],
    ids=repr,
)
def test_a_damaged_piece_is_refused(piece):
    with pytest.raises(Damaged):
        read_row(empty_row(2).pack() + msgpack.packb(piece), 2)


@pytest.mark.parametrize(
    "failure", [[3, 2, "E", "text", 1], [3, 2, 5, "text"], [-1, 2, "E", ""], [3, None, "E", ""], 5]
)
def test_a_damaged_failure_is_refused(failure):
    with pytest.raises(Damaged):
        bit_of([2, 3, 0, 0, None, [failure]])
    with pytest.raises(Damaged):
        read_values(msgpack.packb([[None, failure]]))
    with pytest.raises(Damaged):
        read_join(msgpack.packb([[[1, 0, "v", [failure]]], None]), 1)


@pytest.mark.parametrize(
    "row", [[1, 0, "v", [], 5], [-1, 0, "v", []], [1, 0, 5, []], [1, 0, "v", 5]]
)
def test_a_damaged_row_of_a_join_is_refused(row):
    with pytest.raises(Damaged):
        read_join(msgpack.packb([[row], None]), 1)


@pytest.mark.parametrize("data", [b"\x05", b"\xc0", b"\xa1x", b"\x81\xa1a\x01"], ids=repr)
def test_a_document_that_is_no_list_is_refused(data):
    for read in (read_values, lambda given: read_join(given, 1), lambda given: read_row(given, 1)):
        with pytest.raises(Damaged):
            read(data)


def test_a_join_that_counts_its_rows_wrongly_is_refused():
    data = pack_join(Join([None, None]))
    for rows in (1, 3):
        with pytest.raises(Damaged, match=f"a join has 2 rows, not {rows}"):
            read_join(data, rows)


def test_numbers_may_be_zero_and_nothing_below():
    assert bit_of([1, 0, 0, 0, b""]) == Bit(State.SUCCEEDED, 0, 0, 0, b"")
    for place in (1, 2, 3):
        for value in (-1, True, 1.0, None):
            packed = [1, 0, 0, 0, b""]
            packed[place] = value
            with pytest.raises(Damaged):
                bit_of(packed)


def test_of_failures_that_are_none_nothing_is_kept():
    assert bit_of([2, 3, 0, 0, None, [None, [4, 3, "Cancelled", "stopped"]]]).failures == (
        CANCELLED,
    )


@pytest.mark.parametrize(
    "bit",
    [[1, 3, 0, 0, "text"], [1, 3, 0, 1, b""], [2, 3, 0, 0, b""], [1, 3, 0, 0, None], (), None],
)
def test_only_the_usual_bit_is_plain(bit):
    assert not is_plain(bit)
    assert not is_plain((1, 3, 0, 0, b""))
    assert is_plain([1, 3, 7, 0, b""])


def test_a_row_whose_bits_are_not_looked_at_may_be_full_of_failures():
    row = empty_row(2)
    row.set(0, end(0, State.FAILED, failures=(FAILED,)), NIL)
    assert row.as_full("doc") == FullRow(0, 1, "doc", [FAILED]), "as far as it is filled"
    row.set(1, end(1, State.FAILED, failures=tuple([CANCELLED] * 25)), NIL)
    assert len(row.as_full("doc").failures) == 20
    assert row.plain_values() is None


def test_an_end_of_a_failure_keeps_no_value_and_takes_its_bytes_back():
    row = empty_row(1)
    row.set(0, end(value=b"12345"), b"12345")
    assert row.set(0, end(state=State.FAILED, generation=1, value=b"123"), b"123")
    assert (row.inline_bytes, row.bit(0).value) == (0, None)
    assert row.outdated
