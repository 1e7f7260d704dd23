"""Edits of rows, joins and roots: what they change, and that a change is never lost."""

from dataclasses import replace

import msgpack
import pytest

from aztask.stores.records.base import State
from aztask.stores.records.workflows import ROOT
from aztask.workflows.bits import INLINE_BYTES, Failure, FullRow, Join, MemberEnd, ParkedValue
from aztask.workflows.edits import (
    NEARLY_FULL,
    PIECE_BYTES,
    PIECES,
    JoinEdit,
    RootEdit,
    RowEdit,
    join_name,
    row_name,
    values_name,
)
from aztask.workflows.graph import Root, read_root
from aztask.workflows.packing import pack_join, read_join, read_values
from aztask.workflows.plan import RUN, JoinSlot, Layout, Node
from aztask.workflows.rows import empty_row, read_row

SIZE = 3


def end(member, *, state=State.SUCCEEDED, value=b"\x01", first=True, generation=0):
    failures = () if state is State.SUCCEEDED else (Failure(7, state, "E", "text"),)
    return MemberEnd(JoinSlot(2, member), SIZE, 7, generation, state, value, failures, first=first)


def edit(*ends, size=SIZE, passes_errors=False, left=0):
    return RowEdit("w", 2, 0, Layout(size), list(ends), 5.0, passes_errors, left=left)


def full_row(revision=0, failed=0, values="v"):
    return FullRow(revision, failed, values, [Failure(7, State.FAILED)] * failed)


def test_documents_have_the_names_of_every_release():
    assert (row_name(2, 1), join_name(2), values_name(2, 1, 4)) == (
        "bits-2-1", "join-2", "row-2-1-4",
    )  # fmt: skip


# -- rows ----------------------------------------------------------------------------------------


def test_the_last_member_decides_in_the_same_write():
    first = edit(end(0), end(1, state=State.FAILED))
    data = first.apply(None)
    assert (first.row.ended, first.row.decision, first.decides) == (2, None, False)
    last = edit(end(2))
    row = read_row(last.apply(data), SIZE)
    assert last.decides
    assert row.decision == last.row.decision
    assert (row.decision.state, row.decision.failed, row.decision.at) == (State.FAILED, 1, 5.0)
    assert row.decision.by == last.token
    assert row.decision.values == ()


def test_a_row_that_was_decided_by_another_is_left_as_it_is():
    data = edit(end(0), end(1), end(2)).apply(None)
    again = edit(end(2, first=False))
    assert again.apply(data) is None
    assert again.row.decision is not None
    assert not again.decides


def test_a_decision_without_a_name_is_nobodys():
    """As releases before names wrote it, or one that housekeeping found."""
    data = edit(end(0), end(1), end(2)).apply(None)
    row = read_row(data, SIZE)
    row.decision = replace(row.decision, by="")
    again = edit(end(2, first=False))
    again.apply(row.pack())
    assert again.row.decision is not None
    assert not again.decides


def test_what_a_join_passes_on_is_said_by_the_edit():
    ends = [end(n, state=State.FAILED) for n in range(SIZE)]
    passing = edit(*ends, passes_errors=True)
    passing.apply(None)
    assert passing.row.decision.state is State.SUCCEEDED


def test_an_end_that_is_older_than_its_bit_changes_nothing_but_its_neighbours_count():
    data = edit(end(0, generation=2)).apply(None)
    mixed = edit(end(0), end(1))
    assert read_row(mixed.apply(data), SIZE).ended == 2
    mixed = edit(end(1), end(0))
    assert read_row(mixed.apply(data), SIZE).ended == 2
    assert edit(end(0)).apply(data) is None


def test_a_row_of_a_large_join_decides_nothing():
    layout = Layout(5_000)
    assert layout.rows > 1
    ends = [
        MemberEnd(JoinSlot(2, member), 5_000, 7, 0, State.SUCCEEDED, b"\x01")
        for member in range(5_000)
        if layout.place(member)[0] == 0
    ]
    made = RowEdit("w", 2, 0, layout, ends, 5.0, passes_errors=False)
    made.apply(None)
    assert (made.row.full, made.row.decision) == (True, None)


def test_values_that_do_not_fit_are_parked_in_one_document():
    large = bytes(INLINE_BYTES // 2 + 1)
    made = edit(end(0, value=large), end(1, value=large))
    data = made.apply(None)
    (document,) = made.first()
    assert made.first() == [], "once"
    assert read_values(document.data) == [(large, None), (large, None)]
    assert [bit and bit.value for bit in read_row(data, SIZE).bits] == [
        ParkedValue(document.name, 0), ParkedValue(document.name, 1), None,
    ]  # fmt: skip
    again = made.apply(None)
    assert read_row(again, SIZE).bits == read_row(data, SIZE).bits
    assert made.first() == []


def test_values_that_just_fit_stay_in_the_row():
    made = edit(end(0, value=bytes(INLINE_BYTES)))
    data = made.apply(None)
    assert made.first() == []
    assert read_row(data, SIZE).inline_bytes == INLINE_BYTES
    more = edit(end(1, value=b"\x01"))
    more.apply(data)
    assert len(more.first()) == 1, "nothing more fits into it"


def test_only_small_ends_that_are_set_for_the_first_time_are_appended():
    made = edit(end(0), end(2, generation=4))
    assert set(made.pieces()) == {"0_7_0", "2_7_4"}
    assert made.pieces() == {}, "once"
    assert edit(end(0), end(1, first=False)).pieces() == {}
    assert edit(end(0), end(1, value=bytes(PIECE_BYTES))).pieces() == {}
    assert edit().pieces() == {}
    many = [end(n)._replace(size=100) for n in range(PIECES + 1)]
    assert edit(*many, size=100).pieces() == {}
    assert len(edit(*many[:PIECES], size=100).pieces()) == PIECES


def test_after_it_was_appended_an_edit_says_whether_others_write_and_what_is_left():
    made = edit(end(0), left=SIZE)
    (piece,) = made.pieces().values()
    alone = made.appended(empty_row(SIZE).pack() + piece)
    assert (alone.alone, alone.done) == (True, True)
    assert read_row(alone.row.pack(), SIZE).ended == 1
    other = edit(end(0), left=SIZE)
    data = edit(end(1)).apply(None)
    assert not other.appended(data + piece).alone
    last = edit(end(0), left=1)
    decided = last.appended(edit(end(1), end(2)).apply(None) + piece)
    assert not decided.done, "the decision is to be written"


def test_an_edit_is_patient_unless_few_members_are_left():
    assert edit(end(0), left=NEARLY_FULL + 1).patient
    assert not edit(end(0), left=NEARLY_FULL).patient
    assert not JoinEdit("w", Node(2, size=SIZE), {}, 5.0).patient
    assert not RootEdit("w", lambda root: root).patient


# -- joins ---------------------------------------------------------------------------------------


NODE = Node(2, size=5_000)


def joined(rows, decision=None):
    return pack_join(Join(rows, decision))


def test_a_row_that_changes_is_written_whatever_the_rows_beside_it_do():
    assert NODE.rows > 1
    rest = [None] * (NODE.rows - 2)
    known = joined([full_row(1), None, *rest])
    for rows in ({0: full_row(1), 1: full_row()}, {1: full_row(), 0: full_row(1)}):
        found = read_join(JoinEdit("w", NODE, rows, 5.0).apply(known), NODE.rows)
        assert found.rows[1] == full_row()
    assert JoinEdit("w", NODE, {0: full_row(1)}, 5.0).apply(known) is None


def test_the_last_full_row_decides_the_join():
    rows = {number: full_row(1, 0, f"v{number}") for number in range(NODE.rows)}
    last = rows.pop(NODE.rows - 1)
    first = JoinEdit("w", NODE, rows, 5.0)
    data = first.apply(None)
    assert (first.join.decision, first.decides) == (None, False)
    made = JoinEdit("w", NODE, {NODE.rows - 1: last}, 6.0)
    decision = read_join(made.apply(data), NODE.rows).decision
    assert made.decides
    assert (decision.state, decision.at, decision.generation) == (State.SUCCEEDED, 6.0, NODE.rows)
    assert decision.values == tuple(f"v{number}" for number in range(NODE.rows))
    later = JoinEdit("w", NODE, {0: full_row(9, 1)}, 7.0)
    assert later.apply(made.apply(data)) is None
    assert not later.decides


def test_a_decision_of_a_join_without_a_name_is_nobodys():
    rows = {number: full_row(1, 0, f"v{number}") for number in range(NODE.rows)}
    made = JoinEdit("w", NODE, rows, 5.0)
    join = read_join(made.apply(None), NODE.rows)
    data = joined(join.rows, replace(join.decision, by=""))
    again = JoinEdit("w", NODE, {0: full_row(1)}, 6.0)
    assert again.apply(data) is None
    assert again.join.decision is not None
    assert not again.decides


def test_a_row_that_fails_later_is_decided_anew_by_the_one_that_notes_it():
    rows = {number: full_row(1, int(number == 0), f"v{number}") for number in range(NODE.rows)}
    data = JoinEdit("w", NODE, rows, 5.0).apply(None)
    later = JoinEdit("w", NODE, {0: full_row(2, 0, "new")}, 6.0)
    decision = read_join(later.apply(data), NODE.rows).decision
    assert later.decides
    assert (decision.state, decision.at, decision.values[0]) == (State.SUCCEEDED, 6.0, "new")


def test_an_edit_whose_first_write_was_lost_still_knows_its_decision():
    """The store wrote it, and its answer did not come back."""
    made = edit(end(0), end(1), end(2))
    data = made.apply(None)
    assert made.apply(data) is None
    assert made.decides
    rows = {number: full_row() for number in range(NODE.rows)}
    joining = JoinEdit("w", NODE, rows, 5.0)
    data = joining.apply(None)
    assert joining.apply(data) is None
    assert joining.decides


@pytest.mark.parametrize("size", [RUN - 1, RUN])
def test_a_row_of_a_large_join_is_made_with_the_workflow(size):
    assert edit(end(0), size=size).exists == (size >= RUN)
    for other in (JoinEdit("w", NODE, {}, 5.0), RootEdit("w", lambda root: root)):
        assert not other.exists
        assert other.pieces() == {}
        assert list(other.first()) == []
        answer = other.appended(b"")
        assert (answer.alone, answer.done, answer.row) == (True, False, None)


def test_an_edit_is_fresh_if_all_its_ends_are_set_for_the_first_time():
    assert edit(end(0), end(1)).fresh
    assert not edit(end(0), end(1, first=False)).fresh
    assert not edit().fresh
    assert edit(end(0)).place == ("w", "bits-2-0")
    assert JoinEdit("w", NODE, {}, 5.0).place == ("w", "join-2")
    plain = RowEdit("w", 2, 0, Layout(SIZE), [], 5.0, passes_errors=False)
    assert (plain.left, plain.token, plain.row, plain.patient) == (0, "", None, False)


def test_after_an_append_a_decided_row_is_left_to_others_to_fold():
    made = edit(end(0, generation=0), left=SIZE)
    (piece,) = made.pieces().values()
    decided = edit(end(0), end(1), end(2)).apply(None)
    answer = made.appended(decided + piece)
    assert answer.done
    assert answer.row is None
    assert not answer.alone, "others have ended"


def test_what_others_added_to_a_row_is_seen_by_how_many_are_left():
    for before, alone in ((SIZE, True), (SIZE - 1, True)):
        made = edit(end(0), left=before)
        (piece,) = made.pieces().values()
        assert made.appended(empty_row(SIZE).pack() + piece).alone == alone
    made = edit(end(0), end(1), left=SIZE)
    pieces = b"".join(made.pieces().values())
    assert made.appended(empty_row(SIZE).pack() + pieces).alone


def test_pieces_have_the_size_of_a_kibibyte_at_most():
    head = len(next(iter(edit(end(0, value=bytes(500))).pieces().values()))) - 500
    fits = end(0, value=bytes(1024 - head))
    assert len(edit(fits).pieces()) == 1
    assert edit(end(0, value=bytes(1025 - head))).pieces() == {}
    assert (PIECES, PIECE_BYTES, NEARLY_FULL) == (32, 1024, 12)


def test_parked_values_have_names_of_their_own():
    large = bytes(INLINE_BYTES // 2 + 1)
    documents = [edit(end(0, value=large), end(1, value=large)) for _ in range(2)]
    for each in documents:
        each.apply(None)
    first, second = (each.first()[0] for each in documents)
    assert first.workflow == "w"
    assert first.name.startswith("values-2-0-")
    assert first.name != second.name


def test_without_the_root_nothing_was_changed():
    made = RootEdit("w", lambda root: root)
    made.apply(Root(1.0, "token", 3).pack())
    made.orphaned()
    assert made.root is None


@pytest.mark.parametrize(("passes", "state"), [(False, State.FAILED), (True, State.SUCCEEDED)])
def test_a_join_with_a_failed_row_fails_unless_it_passes_errors(passes, state):
    rows = {number: full_row(0, number == 0) for number in range(NODE.rows)}
    made = JoinEdit("w", NODE._replace(passes_errors=passes), rows, 5.0)
    made.apply(None)
    assert made.join.decision.state is state


def test_without_the_workflow_nothing_is_decided():
    for made in (edit(end(0), end(1), end(2)), JoinEdit("w", NODE, {}, 5.0)):
        made.apply(None)
        made.orphaned()
        assert not made.decides


# -- roots ---------------------------------------------------------------------------------------


def test_a_root_is_changed_if_it_exists_and_differs():
    root = Root(1.0, "token", 3, (1,))
    made = RootEdit("w", lambda before: before)
    assert made.place == ("w", ROOT)
    assert made.apply(None) is None
    assert made.apply(root.pack()) is None
    assert (made.before, made.root) == (root, root)
    ended = RootEdit("w", lambda before: Root(before.at, before.token, 3, (1,), ended_at=9.0))
    assert read_root(ended.apply(root.pack())).ended_at == 9.0
    assert ended.before == root


def test_rows_are_lists_of_three_parts_as_in_every_release():
    assert msgpack.unpackb(empty_row(2).pack()) == [[None, None], None, 0]
