"""Bits that are appended to a contended row count like those that are written into it."""

from __future__ import annotations

from contextlib import closing

import pytest
from still import Still

from aztask import App, chord
from aztask.queues.engine import Database
from aztask.stores.records.base import State
from aztask.stores.records.damage import Damaged
from aztask.stores.records.local.store import LocalResults
from aztask.stores.records.workflows import ROOT, DocumentChange
from aztask.support.clock import Clock
from aztask.workflows import documents as module
from aztask.workflows.bits import Failure, MemberEnd
from aztask.workflows.documents import Documents, Pace
from aztask.workflows.edits import RowEdit, row_name
from aztask.workflows.engine import engine_for
from aztask.workflows.joins import TaskEnd
from aztask.workflows.packing import pack_late
from aztask.workflows.place import NodePlace
from aztask.workflows.plan import JoinSlot, Layout
from aztask.workflows.rows import empty_row, read_row

SIZE = 40
LAYOUT = Layout(SIZE)


class Counting:
    """The workflows of a store, whose requests are counted as those of Azure Tables are."""

    def __init__(self, store):
        self._store, self.requests = store, 0

    def read(self, names):
        self.requests += len(names)
        return self._store.read(names)

    def write(self, changes):
        self.requests += len(changes)
        return self._store.write(changes)

    def append(self, additions):
        self.requests += 2 * len(additions)
        return self._store.append(additions)


@pytest.fixture
def store(tmp_path):
    database = Database(str(tmp_path / "results.db"))
    results = LocalResults(database)
    results.workflows.write([DocumentChange("w", ROOT, b"r")])
    results.workflows.write([DocumentChange("w", row_name(2, 0), empty_row(SIZE).pack())])
    yield Counting(results.workflows)
    database.close()


def process(store, *, contended=True):
    """The documents as one process has them."""
    clock = Clock(monotonic=Still().monotonic, sleep=lambda seconds: None)
    pace = Pace(clock)
    if contended:
        pace.met()
    return Documents(store, remote=True, clock=clock, pace=pace)


def end(member, *, node=3, generation=0, state=State.SUCCEEDED, value=b"\x01", first=True):
    failures = () if state is State.SUCCEEDED else (Failure(node, state, "E", "text"),)
    return MemberEnd(
        JoinSlot(2, member), SIZE, node, generation, state, value, failures, first=first
    )


def edit(*ends, left=SIZE):
    return RowEdit("w", 2, 0, LAYOUT, list(ends), 5.0, passes_errors=False, left=left)


def row_of(store):
    (found,) = store.read([("w", row_name(2, 0))])
    return read_row(found.data, SIZE)


def test_a_contended_bit_costs_two_requests_and_is_seen_by_others(store):
    one, two = process(store), process(store)
    for number in range(0, 20, 2):
        for documents, member in ((one, number), (two, number + 1)):
            before = store.requests
            made = edit(end(member))
            documents.change([made])
            assert store.requests - before == 2
            assert made.row.ended == member + 1
    assert row_of(store).ended == 20


def test_a_row_that_this_process_does_not_know_is_appended_to_and_then_written(store):
    """To read it first would cost as much; and what was appended is not written again."""
    calm, costs = process(store, contended=False), []
    for members in ((0, 1), (2, 3), (4,)):
        before = store.requests
        calm.change([edit(*(end(member) for member in members))])
        costs.append(store.requests - before)
    assert costs == [2, 1, 1]
    assert row_of(store).ended == 5


def test_a_writer_that_meets_another_one_appends_and_waits_for_nobody(store):
    slept = []
    calm = Documents(store, remote=True, clock=Clock(sleep=slept.append), pace=Pace(Still()))
    calm.change([edit(end(0))])
    process(store, contended=False).change([edit(end(1))])
    before = store.requests
    calm.change([edit(end(2))])
    assert store.requests - before == 3, "a write that fails, an append, a look"
    assert slept == []
    assert row_of(store).ended == 3


def test_a_writer_that_meets_nobody_any_longer_writes_again(store):
    documents, left, costs = process(store), SIZE, []
    for member in range(12):
        before = store.requests
        made = edit(end(member), left=left)
        documents.change([made])
        left = made.row.left
        costs.append(store.requests - before)
    assert costs[0] == 2
    assert costs[-1] == 1


@pytest.mark.parametrize(
    "given",
    [end(0, first=False), end(0, value=bytes(5000))],
    ids=["repeated", "large"],
)
def test_what_may_not_be_appended_is_written(store, given):
    process(store).change([edit(given)])
    (found,) = store.read([("w", row_name(2, 0))])
    assert found.tag == "2"
    assert len(found.data) > len(empty_row(SIZE).pack())
    assert row_of(store).ended == 1


def test_a_writer_with_an_old_version_finds_what_was_appended(store):
    calm, busy = process(store, contended=False), process(store)
    calm.change([edit(end(0))])
    busy.change([edit(end(1))])
    made = edit(end(2))
    calm.change([made])
    assert made.row.ended == row_of(store).ended == 3


def test_the_last_appended_bit_decides_the_join(store):
    ends = [end(member) for member in range(SIZE)]
    one, two = process(store), process(store)
    one.change([edit(*ends[:20])])
    two.change([edit(*ends[20:39])])
    last = edit(ends[39])
    one.change([last])
    assert last.row.decision.state is State.SUCCEEDED
    assert row_of(store).decision == last.row.decision
    late = edit(end(0, node=4, state=State.FAILED))
    two.change([late])
    assert row_of(store).decision == last.row.decision, "a join that has succeeded is frozen"


def test_after_a_crash_before_the_decision_a_repeated_end_decides(store):
    full = {f"p{member}": pack_late(member, end(member)) for member in range(SIZE)}
    store._store.append([module.Addition("w", row_name(2, 0), full)])
    assert (row_of(store).full, row_of(store).decision) == (True, None)
    repeated = edit(end(5, first=False))
    process(store, contended=False).change([repeated])
    assert row_of(store).decision.state is State.SUCCEEDED


def test_a_replay_of_a_decided_row_makes_it_outdated_until_it_is_decided_again(store):
    failed = [end(member, state=State.FAILED) for member in range(SIZE)]
    process(store, contended=False).change([edit(*failed)])
    before = row_of(store).decision
    piece = pack_late(7, end(7, node=4))
    store._store.append([module.Addition("w", row_name(2, 0), {"p": piece})])
    row = row_of(store)
    assert (row.decision, row.outdated) == (before, True)
    process(store).change([edit(end(8, node=4))])
    row = row_of(store)
    assert not row.outdated
    assert row.decision.failed == SIZE - 2
    assert row.decision.generation == before.generation + 2


def test_a_lower_version_that_is_appended_late_changes_nothing(store):
    for given in (end(0, state=State.FAILED), end(0, node=4), end(0, state=State.FAILED)):
        process(store).change([edit(given)])
    bit = row_of(store).bit(0)
    assert (bit.node, bit.state, bit.revision) == (4, State.SUCCEEDED, 1)


def test_many_pieces_are_written_into_the_row(store, monkeypatch):
    monkeypatch.setattr(module, "FOLD", 4)
    monkeypatch.setattr(module, "FOLD_SHARE", 1.0)
    documents = process(store)
    for member in range(20):
        documents.change([edit(end(member))])
    assert row_of(store).ended == 20
    monkeypatch.setattr(store, "append", lambda additions: [None])
    documents.change([edit(end(20))])
    assert row_of(store).ended == 21, "a row that is full of pieces is written"


@pytest.mark.parametrize(
    "piece", [b"\x01", b"\x92\x00", b"\x92\x00\xc0", pack_late(SIZE, end(0)), b"\xc1"]
)
def test_a_damaged_piece_is_noticed(piece):
    with pytest.raises(Damaged):
        read_row(empty_row(SIZE).pack() + piece, SIZE)


def test_of_two_processes_that_find_the_last_row_full_one_sends_the_body(tmp_path):
    """Both appended before either of them read the row."""
    address = f"local://{tmp_path}/queues.db"
    with closing(App("shop", broker=address, results=address)) as app:
        page, book = (app.task(name=name)(lambda x: x) for name in ("shop.page", "shop.book"))
        chord([page.s(n) for n in range(2)], book.s()).delay(workflow_id="w")
        plan = app.workflows.engine.graphs.plan("w")
        engines = [engine_for(app.results, app.workflows, app.codec) for _ in range(2)]
        ends = [
            TaskEnd("w", NodePlace.of(plan, plan.nodes[number]), 0, State.SUCCEEDED, b"\x01")
            for number in (2, 3)
        ]
        for engine in engines:
            engine.documents = engine.joins.documents = process(engine.store)
        engines[0].joins.ended([ends[0]._replace(repeated=True)])  # the row exists
        for engine, given in zip(engines, (ends[1], ends[1]), strict=True):
            engine.joins.ended([given])
        assert app.broker.stats("default").active == 3, "two members and one body"
        engines[1].joins.ended([ends[1]._replace(repeated=True)])
        assert app.broker.stats("default").active == 4, "a redelivery sends it again"
