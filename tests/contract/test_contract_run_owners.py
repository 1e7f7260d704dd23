"""Runs, cancellations and workflows of two owners in one store, and those without an owner."""

from __future__ import annotations

import time
from collections.abc import Iterator

import pytest
from owners import FACTORIES, World, Worlds

from aztask.address.owner import NO_OWNER, Owner
from aztask.errors import ForeignId
from aztask.message.envelope import Envelope
from aztask.settlement import Complete
from aztask.stores.records.base import (
    UNFINISHED_SECONDS,
    Finish,
    Foreign,
    Outcome,
    Owned,
    Recorded,
    ResultStore,
    RunKey,
    RunRecord,
    Start,
    State,
    WorkerRecord,
)
from aztask.stores.records.deadindex import IndexedDeadLetter
from aztask.stores.records.owners import OwnedRows, parts_of
from aztask.stores.records.workflows import ROOT, DocumentChange, workflows_of

pytestmark = pytest.mark.timeout(300)


@pytest.fixture(scope="module", params=sorted(FACTORIES))
def make(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Worlds]:
    with FACTORIES[request.param](tmp_path_factory.mktemp("owners")) as make:
        yield make


@pytest.fixture
def worlds(make: Worlds) -> Iterator[tuple[World, World]]:
    found = make()
    yield found
    for each in found:
        each.app.close()


@pytest.fixture
def mine(worlds: tuple[World, World]) -> ResultStore:
    return worlds[0].store


@pytest.fixture
def theirs(worlds: tuple[World, World]) -> ResultStore:
    return worlds[1].store


def a_start(name: str, owner: str = "lease", generation: int = 0, position: int = 1) -> Start:
    return Start(RunKey(name, generation), "t", "q", position, owner, "w", time.time())


def ended(at: float, value: bytes = b"v") -> Outcome:
    return Outcome(State.SUCCEEDED, Complete(), value, at=at)


def finish(store: ResultStore, name: str, at: float) -> None:
    store.start([a_start(name)])
    assert store.record([Finish(RunKey(name), "lease", ended(at))]) == [True]


@pytest.fixture
def nobody(worlds: tuple[World, World]) -> ResultStore:
    return worlds[0].again(NO_OWNER)


def test_an_id_of_another_owner_is_a_conflict(mine: ResultStore, theirs: ResultStore) -> None:
    assert mine.start([a_start("a")]) == [Owned(1)]
    (answer,) = theirs.start([a_start("a", "other", position=2)])
    assert isinstance(answer, Foreign)
    assert answer.broker == mine.get("a").broker != ""  # type: ignore[union-attr]
    assert theirs.record([Finish(RunKey("a"), "other", ended(5.0))]) == [False]
    buried = RunRecord(RunKey("a"), "t", "q", State.FAILED, outcome=ended(5.0))
    assert theirs.bury([buried]) == [False]
    for ask in (theirs.get, theirs.history, theirs.forget):
        with pytest.raises(ForeignId, match="use another task id") as caught:
            ask("a")
        assert caught.value.owner == answer.broker
    with pytest.raises(ForeignId):
        theirs.cancel("a", 5.0)
    assert mine.get("a").state is State.STARTED  # type: ignore[union-attr]


def test_an_id_that_was_sent_by_another_owner_is_a_conflict(
    mine: ResultStore, theirs: ResultStore
) -> None:
    mine.expect([RunRecord(RunKey("a"), "t", "q", State.PENDING, note=b"mine")])
    theirs.expect([RunRecord(RunKey("a"), "t", "q", State.PENDING, note=b"theirs")])
    assert mine.get("a").note == b"mine"  # type: ignore[union-attr]
    with pytest.raises(ForeignId):
        theirs.get("a")


def test_each_owner_of_an_id_sees_its_own_runs(mine: ResultStore, theirs: ResultStore) -> None:
    """A replay of the dead letter of such a message runs in the next generation."""
    finish(mine, "a", 5.0)
    assert theirs.start([a_start("a", generation=1)]) == [Owned(1)]
    assert mine.get("a").key == RunKey("a", 0)  # type: ignore[union-attr]
    assert theirs.get("a").key == RunKey("a", 1)  # type: ignore[union-attr]
    assert [run.key.generation for run in mine.history("a")] == [0]
    assert [run.key.generation for run in theirs.history("a")] == [1]
    assert theirs.forget("a")
    assert mine.get("a").state is State.SUCCEEDED  # type: ignore[union-attr]


def test_a_row_without_an_owner_is_adopted_by_its_first_start(
    mine: ResultStore, theirs: ResultStore, nobody: ResultStore
) -> None:
    nobody.start([a_start("open", "old"), a_start("ended", "old")])
    nobody.record([Finish(RunKey("ended"), "old", ended(5.0))])
    assert theirs.get("open").broker == ""  # type: ignore[union-attr]
    again = [a_start("open"), a_start("ended")]
    assert mine.start(again) == [Owned(2), Recorded(ended(5.0))]
    assert all(isinstance(answer, Foreign) for answer in theirs.start(again))
    with pytest.raises(ForeignId):
        theirs.get("ended")


def test_a_row_without_an_owner_is_adopted_by_its_record(
    mine: ResultStore, theirs: ResultStore, nobody: ResultStore
) -> None:
    nobody.start([a_start("a")])
    assert mine.record([Finish(RunKey("a"), "lease", ended(5.0))]) == [True]
    with pytest.raises(ForeignId):
        theirs.get("a")
    assert [run.key.task_id for run in mine.recent()] == ["a"]


def test_a_purge_deletes_own_rows_only(
    mine: ResultStore, theirs: ResultStore, nobody: ResultStore
) -> None:
    now = time.time()
    for store, name in ((mine, "mine"), (theirs, "theirs"), (nobody, "nobody")):
        finish(store, name, now - 100.0)
        store.expect([RunRecord(RunKey(f"{name}-sent"), "t", "q", State.PENDING, due=now - 100.0)])
        store.cancel(f"{name}-cancelled", now - 100.0)
    theirs.purge(now)
    assert mine.get("mine").state is State.SUCCEEDED  # type: ignore[union-attr]
    assert mine.get("mine-sent").state is State.PENDING  # type: ignore[union-attr]
    assert mine.get("mine-cancelled").state is State.CANCELLED  # type: ignore[union-attr]
    assert nobody.get("nobody").state is State.SUCCEEDED  # type: ignore[union-attr]
    assert theirs.get("theirs") is theirs.get("theirs-cancelled") is None


def test_a_row_that_nobody_adopts_is_purged_much_later(
    mine: ResultStore, nobody: ResultStore
) -> None:
    now = time.time()
    finish(nobody, "young", now - 100.0)
    finish(nobody, "old", now - UNFINISHED_SECONDS - 100.0)
    assert mine.unowned(now + 3600.0) >= 2  # type: ignore[attr-defined]
    assert mine.purge(now) == 1
    assert nobody.get("old") is None
    assert nobody.get("young") is not None


def test_a_cancellation_holds_for_its_owner_only(
    mine: ResultStore, theirs: ResultStore, nobody: ResultStore
) -> None:
    now = time.time()
    assert theirs.cancel("a", now, running=True)
    assert nobody.cancel("b", now, running=True)
    assert mine.to_stop(["a", "b"]) == ["b"]
    assert theirs.to_stop(["a", "b"]) == ["a", "b"]
    assert mine.get("a") is None
    assert mine.start([a_start("a")]) == [Owned(1)]


def test_many_marks_of_another_owner_cancel_nothing(mine: ResultStore, theirs: ResultStore) -> None:
    now = time.time()
    for number in range(300):
        theirs.cancel(f"task-{number}", now, running=True)
    mine.cancel("task-7", now, running=True)
    ids = [f"task-{number}" for number in range(20)]
    assert mine.to_stop(ids) == ["task-7"]
    assert theirs.to_stop(ids) == ids


def test_lists_show_other_owners_only_if_asked(mine: ResultStore, theirs: ResultStore) -> None:
    now = time.time()
    for store, name in ((mine, "mine"), (theirs, "theirs")):
        store.heartbeat(WorkerRecord(name, now, now, ("q",), 0, 0))
        finish(store, name, now)
    assert [run.key.task_id for run in mine.recent()] == ["mine"]
    assert [run.key.task_id for run in mine.recent(state=State.SUCCEEDED)] == ["mine"]
    everyone = {run.key.task_id: run.broker for run in mine.recent(everyone=True)}
    assert set(everyone) == {"mine", "theirs"}
    assert everyone["mine"] != everyone["theirs"]
    assert [each.name for each in mine.workers()] == ["mine"]
    assert {each.name for each in mine.workers(everyone=True)} == {"mine", "theirs"}


def test_a_workflow_of_another_owner_is_a_conflict(mine: ResultStore, theirs: ResultStore) -> None:
    own, foreign = workflows_of(mine), workflows_of(theirs)
    assert own is not None
    assert foreign is not None
    own.announce("w", 1.0)
    own.write([DocumentChange("w", ROOT, b"root")])
    with pytest.raises(ForeignId, match="use another workflow id"):
        foreign.announce("w", 2.0)
    with pytest.raises(ForeignId):
        foreign.read([("w", ROOT)])
    assert foreign.open_workflows(10) == []
    (listed,) = own.open_workflows(10)
    assert not foreign.delete_workflow(listed)
    own.close_workflow("w", 1.0, 2.0)
    assert foreign.ended_workflows(10) == foreign.ended_workflows(10, time.time()) == []
    (listed,) = own.ended_workflows(10, 3.0)
    assert not foreign.delete_workflow(listed)
    assert own.read([("w", ROOT)])[0].data == b"root"  # type: ignore[union-attr]
    assert own.delete_workflow(listed)


def test_a_workflow_without_an_owner_has_one_adopter(
    mine: ResultStore, theirs: ResultStore, nobody: ResultStore
) -> None:
    old, own, foreign = (workflows_of(store) for store in (nobody, mine, theirs))
    assert old is not None
    assert own is not None
    assert foreign is not None
    old.announce("w", 1.0)
    old.write([DocumentChange("w", ROOT, b"root")])
    assert own.open_workflows(10) == foreign.open_workflows(10) == []
    assert [each.workflow for each in own.all_workflows(10)] == ["w"]
    assert own.unowned(2.0) == 1  # type: ignore[attr-defined]
    own.own_workflow("w", 1.0)
    own.own_workflow("w", 1.0)
    with pytest.raises(ForeignId):
        foreign.own_workflow("w", 1.0)
    assert [each.workflow for each in own.open_workflows(10)] == ["w"]
    with pytest.raises(ForeignId):
        foreign.read([("w", ROOT)])


def test_an_owner_adopts_the_rows_of_another(mine: ResultStore, theirs: ResultStore) -> None:
    now = time.time()
    own, old = workflows_of(mine), workflows_of(theirs)
    assert own is not None
    assert old is not None
    theirs.heartbeat(WorkerRecord("w", now, now, ("q",), 0, 0))
    finish(theirs, "ended", now)
    theirs.start([a_start("runs")])
    theirs.expect([RunRecord(RunKey("sent"), "t", "q", State.PENDING)])
    theirs.cancel("cancelled", now, running=True)
    for name in ("open", "ended"):
        old.announce(name, 1.0)
        old.write([DocumentChange(name, ROOT, b"root")])
    old.close_workflow("ended", 1.0, 2.0)
    owner = Owner(theirs.get("ended").broker)  # type: ignore[union-attr]
    for part in (mine, own):
        assert isinstance(part, OwnedRows)
        assert owner in part.owners()
        assert part.adopt(owner) >= 1
        assert part.adopt(owner) == 0
    assert mine.get("runs").state is State.STARTED  # type: ignore[union-attr]
    assert mine.get("sent").state is State.PENDING  # type: ignore[union-attr]
    assert mine.to_stop(["cancelled"]) == ["cancelled"]
    assert theirs.to_stop(["cancelled"]) == []
    assert [run.key.task_id for run in mine.recent(state=State.SUCCEEDED)] == ["ended"]
    assert [each.workflow for each in own.open_workflows(10)] == ["open"]
    assert [each.workflow for each in own.ended_workflows(10)] == ["ended"]
    assert own.read([("ended", ROOT)])[0] is not None
    with pytest.raises(ForeignId):
        theirs.get("ended")
    assert mine.purge(now + 10.0) >= 1


def test_a_renamed_app_loses_nothing_that_belongs_to_its_broker(
    worlds: tuple[World, World],
) -> None:
    """It adopts what its former name declared: ``APP on BROKER``, and the broker is its own."""
    mine, now = worlds[0].store, time.time()
    own = workflows_of(mine)
    assert own is not None
    mine.heartbeat(WorkerRecord("w", now, now, ("q",), 0, 0))
    finish(mine, "ended", now)
    mine.cancel("cancelled", now, running=True)
    own.announce("w", 1.0)
    own.write([DocumentChange("w", ROOT, b"root")])
    own.close_workflow("w", 1.0, 2.0)
    letter = IndexedDeadLetter("q", Envelope(b"x", message_id="m"), "r", "d", now, 1)
    mine.dead_index.note([letter])  # type: ignore[attr-defined]
    mine.uniques.write("k", b"x", now, None)  # type: ignore[attr-defined]
    former = Owner(worlds[0].owner.broker, "former")
    for part in parts_of(mine):
        assert isinstance(part, OwnedRows)
        known = part.owners()
        assert part.adopt(former) == 0
        assert part.owners() == known
    assert [run.key.task_id for run in mine.recent(state=State.SUCCEEDED)] == ["ended"]
    assert mine.to_stop(["cancelled"]) == ["cancelled"]
    assert [each.workflow for each in own.ended_workflows(10)] == ["w"]
    assert list(mine.dead_index.notes("q")) == [letter]  # type: ignore[attr-defined]
    assert mine.uniques.read("k") is not None  # type: ignore[attr-defined]
