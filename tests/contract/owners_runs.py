"""Scenarios of two owners for what reads runs, cancellations and workflows."""

from __future__ import annotations

import asyncio
import math
import time
from types import SimpleNamespace
from typing import Any, cast

import pytest
from owners import Scenario, World

from aztask import AsyncResult, chain
from aztask.celery.embedded.chords import Chords
from aztask.errors import AztaskError, ConfigurationError, ForeignId
from aztask.limits.control import Scope
from aztask.operate import draining, search, stepcheck, tasks, workers
from aztask.operate import owners as ownerfindings
from aztask.operate.overview import Reader
from aztask.settlement import Complete, DeadLetter
from aztask.steps import signals
from aztask.steps.keepers import StoredOutside
from aztask.steps.keeping import StepPurge
from aztask.steps.records import DONE, STEP, StepRecord, StepStore, steps_of
from aztask.steps.waits import waits_of
from aztask.stores.records.backlogs import Backlogs
from aztask.stores.records.base import (
    Finish,
    Outcome,
    RunKey,
    RunningTask,
    RunRecord,
    Start,
    State,
    WorkerRecord,
)
from aztask.stores.records.history import TASKS, history_of, hour_of
from aztask.stores.records.onceruns import OnceRun, once_runs_of
from aztask.stores.records.tallies import HOUR, Author, Hour, Tally
from aztask.stores.records.watcher import ResultWatcher
from aztask.stores.records.workflows import ROOT, Document, workflows_of
from aztask.support.clock import SYSTEM_CLOCK, Clock
from aztask.support.floodlog import FloodLog
from aztask.worker.lane import lane_of
from aztask.worker.pipeline.settling import Refusals
from aztask.worker.shell import ThreadShell
from aztask.worker.upkeep.heartbeat import LostRuns
from aztask.worker.upkeep.housekeeping import Housekeeping
from aztask.worker.upkeep.recording import BacklogLooks, Recorder, Recording
from aztask.workflows.edits import RootEdit
from aztask.workflows.joins import TaskEnd
from aztask.workflows.place import NodePlace
from aztask.workflows.plan import ROOT as ROOT_NODE

LONG_AGO = 365 * 86400.0


def step(number: int = 0) -> int:
    return number


def ended(world: World, task_id: str, state: State = State.SUCCEEDED, at: float = 0.0) -> None:
    """A run of this world that has ended."""
    key, at = RunKey(task_id), at or time.time()
    world.store.start([Start(key, "step", "default", 1, "lease", "w", at)])
    outcome = Outcome(state, Complete(), b"\x01", "Broken" * (state is State.FAILED), at=at)
    assert world.store.record([Finish(key, "lease", outcome)]) == [True]


def heartbeat(world: World, name: str) -> None:
    """A worker of this world that runs a task."""
    now = time.time()
    running = (RunningTask(f"{name}-task", "step", "default", now),)
    world.store.heartbeat(WorkerRecord(name, now, now, ("default",), 1, 0, tasks=running))


def workflow(world: World, name: str = "w") -> Document:
    """A workflow of this world whose first message waits in its queue; returns its root."""
    task = world.app.tasks.get("step") or world.app.task(name="step")(step)
    chain(task.s(1), task.si(2)).delay(workflow_id=name)
    return root_of(world, name)


def root_of(world: World, name: str = "w") -> Document:
    store = workflows_of(world.store)
    assert store is not None
    (found,) = store.read([(name, ROOT)])
    assert found is not None
    return found


# -- runs ------------------------------------------------------------------------------------


def async_result(mine: World, theirs: World) -> None:
    ended(mine, "a")
    other: AsyncResult[Any] = theirs.app.result("a")
    for ask in (other.ready, other.cancel, other.forget, lambda: other.get(timeout=0)):
        with pytest.raises(ForeignId):
            ask()
    theirs.app.task(name="step")(step)
    with pytest.raises(ForeignId, match="use another task id"):
        theirs.app.send("step", [1], task_id="a")
    assert not theirs.app.broker.queues() or not theirs.app.broker.stats("default").active
    assert mine.app.result("a").get(timeout=0) == 1


def watcher(mine: World, theirs: World) -> None:
    ended(mine, "a")
    ended(theirs, "b")

    async def wait() -> None:
        watching = ResultWatcher(theirs.store)
        found, refused = await asyncio.gather(
            watching.ended("b"), watching.ended("a"), return_exceptions=True
        )
        assert not isinstance(found, BaseException)
        assert isinstance(refused, ForeignId)

    asyncio.run(wait())


def refusals(mine: World, theirs: World) -> None:
    ended(mine, "a")
    refusing = Refusals(
        cast("Any", None), cast("Any", None), theirs.store, name="w", floods=FloodLog(SYSTEM_CLOCK)
    )
    failed = Outcome(State.FAILED, DeadLetter("why", "text"), at=time.time())
    item = SimpleNamespace(
        key=RunKey("a", 0, -1),
        queue="default",
        opened=SimpleNamespace(message=SimpleNamespace(task="step")),
    )
    refusing._buried(cast("Any", item), failed)
    assert mine.app.result("a").state == "succeeded"


def housekeeping(mine: World, theirs: World) -> None:
    ended(mine, "a", at=time.time() - LONG_AGO)
    before = workflow(mine)
    shell = ThreadShell()
    mailbox = shell.mailbox()
    runtime = SimpleNamespace(
        app=theirs.app,
        clock=SYSTEM_CLOCK,
        store_clock=None,
        mailbox=mailbox,
        name="w",
        incarnation="",
        holder="w",
        options=SimpleNamespace(queues=("default",), schedules=False),
        journal=SimpleNamespace(recorder=None),
        lane=lambda name, work, threads: lane_of(name, work, mailbox, threads=threads),
    )
    chores = Housekeeping(cast("Any", runtime), cast("Any", None), cast("Any", None))
    try:
        chores._look_after_workflows(theirs.store)
        kept = theirs.app.settings.result_retention_seconds
        chores._clock = Clock(wall=lambda: time.time() + 60.0 + kept)
        chores._purge(theirs.store)
    finally:
        chores.stop()
    assert mine.app.result("a").state == "succeeded"
    assert root_of(mine) == before


def lost_runs(mine: World, theirs: World) -> None:
    """Their worker ends no run of mine, however long mine is gone."""
    notes, key, at = once_runs_of(mine.store), RunKey("a"), time.time()
    assert notes is not None
    mine.store.start([Start(key, "step", "default", 1, "lease", "gone", at)])
    notes.note([OnceRun(key, "step", "default", "gone", "", at, 1.0)])
    now = [0.0]
    clock = Clock(monotonic=lambda: now[0])
    runtime = SimpleNamespace(app=theirs.app, clock=clock, name="w", incarnation="x", mailbox=None)
    looker = LostRuns(cast("Any", runtime))
    for at in range(0, 60, 5):
        now[0] = float(at)
        looker.beat(theirs.store, 5.0)
        looker.look(theirs.store)
    assert mine.app.result("a").state == "started"


def top(mine: World, theirs: World) -> None:
    heartbeat(mine, "mine")
    ended(mine, "a", State.FAILED)
    figures = Reader(theirs.app, lambda: ()).read()
    assert not figures.workers
    assert not figures.failures


def list_recent(mine: World, theirs: World) -> None:
    for world, name in ((mine, "a"), (theirs, "b")):
        heartbeat(world, f"worker-{name}")
        ended(world, name)
    found = tasks.recent(theirs.app, None, 10).runs
    assert mine.owner.broker == next(run.broker for run in found if run.key.task_id == "a")
    assert (
        len(tasks._readable(theirs.store, None, 10, theirs.store.recent(everyone=True), "").runs)
        == 2
    )
    with pytest.raises(ForeignId):
        tasks.result(theirs.app, "a")


def list_runs(mine: World, theirs: World) -> None:
    """A list has the runs of all, each with its owner; the lines of one owner are its own."""
    for world, name in ((mine, "a"), (theirs, "b")):
        heartbeat(world, f"worker-{name}")
        ended(world, name, State.FAILED)
    for world in (mine, theirs):
        page = search.find_runs(world.app, search.RunFilter(text="A"))
        assert {run.key.task_id: run.broker for run in page.runs}["a"] == mine.owner.broker
        assert search._unreadable(world.store, search.RunFilter(), 10, "").runs == []
        listed = search._listed(world.store, search.RunFilter(), 10, math.inf)
        assert {run.broker for run in listed.runs} == {mine.owner.broker, theirs.owner.broker}
        assert search.newest_figures(world.app).runs == 2
    (found,) = stepcheck._records(theirs.store, iter(["a"]))
    assert isinstance(found[1], ForeignId)
    for world, name in ((mine, "a"), (theirs, "b")):
        lines = world.store.lines()
        assert [each.task_id for each in lines.more(20.0)] == [name]


def list_workers(mine: World, theirs: World) -> None:
    heartbeat(mine, "mine")
    ended(mine, "mine-task")
    assert not workers.heartbeats(theirs.store, time.time(), everyone=False).records
    (worker,) = workers.workers(theirs.app).records
    assert worker.broker == mine.owner.broker
    assert workers._records(theirs.store, ["mine-task"]) == {}
    assert workers._without_ended({}, worker).tasks == worker.tasks


def drain(mine: World, theirs: World) -> None:
    heartbeat(mine, "mine")
    assert not draining.wait_until_idle(theirs.store, {(Scope.QUEUE, "default")}, 0.0)


# -- workflows -------------------------------------------------------------------------------


def workflow_engine(mine: World, theirs: World) -> None:
    before = workflow(mine)
    with pytest.raises(ForeignId, match="use another workflow id"):
        workflow(theirs)
    other = theirs.app.workflows.result("w")
    for ask in (other.ready, other.cancel, other.forget, lambda: other.get(timeout=0)):
        with pytest.raises(ForeignId):
            ask()
    assert not theirs.app.broker.queues() or not theirs.app.broker.stats("default").active
    assert root_of(mine) == before


def documents(mine: World, theirs: World) -> None:
    before = workflow(mine)
    with pytest.raises(ForeignId):
        theirs.app.workflows.engine.documents.change([RootEdit("w", lambda root: root)])
    assert root_of(mine) == before


def graphs(mine: World, theirs: World) -> None:
    workflow(mine)
    for ask in (theirs.app.workflows.engine.graphs.root, theirs.app.workflows.engine.graphs.plan):
        with pytest.raises(ForeignId):
            ask("w")


def inputs(mine: World, theirs: World) -> None:
    workflow(mine)
    with pytest.raises(ForeignId):
        theirs.app.workflows.engine.inputs.value("w", ROOT_NODE)


def joins(mine: World, theirs: World) -> None:
    before = workflow(mine)
    plan = mine.app.workflows.engine.graphs.plan("w")
    assert plan is not None
    last = next(node for node in plan.nodes if node.task and not node.next)
    end = TaskEnd("w", NodePlace.of(plan, last), 0, State.SUCCEEDED, b"\x01", "", "")
    with pytest.raises(AztaskError):
        theirs.app.workflows.engine.joins.ended([end])
    assert root_of(mine) == before
    assert mine.app.workflows.result("w").progress.done == 0


def chords(mine: World, theirs: World) -> None:
    own, other = workflows_of(mine.store), workflows_of(theirs.store)
    assert own is not None
    assert other is not None
    Chords(own).start("g", 3)
    with pytest.raises(ForeignId):
        Chords(other).start("g", 5)
    assert Chords(own).start("g").size == 3


# -- owners ----------------------------------------------------------------------------------


def owner_findings(mine: World, theirs: World) -> None:
    heartbeat(mine, "mine")
    ended(mine, "a")
    (finding,) = ownerfindings.owner_findings(theirs.app, theirs.store)
    assert f"the store is shared with {mine.owner.broker}" in finding.text


def adoption(mine: World, theirs: World) -> None:
    with pytest.raises(ConfigurationError, match="no row belongs to"):
        ownerfindings.adoption(theirs.app, "local://unknown")
    heartbeat(mine, "mine")
    ended(mine, "a")
    workflow(mine)
    wanted = ownerfindings.adoption(theirs.app, mine.owner.broker)
    assert mine.app.result("a").state == "succeeded"  # it was only asked
    assert wanted.act() >= 2
    assert theirs.app.result("a").state == "succeeded"
    assert theirs.app.workflows.result("w").state == "started"
    with pytest.raises(ForeignId):
        mine.app.result("a").ready()


def step_purge(mine: World, theirs: World) -> None:
    stores: list[StepStore] = []
    for world in (mine, theirs):
        store = steps_of(world.store, world.app.codec)
        assert store is not None
        at = store.now() - LONG_AGO
        record = StepRecord(STEP, DONE, "charge", "", "1", False, 1, b"", at, queue="default")
        assert store.write("ended-long-ago", "1", record, None) is not None
        stores.append(store)
    later = stores[0].now() + 60.0
    purge = StepPurge(stores[0], mine.store, mine.app.broker, mine.app.payloads)
    assert purge.purge(later) == 1
    assert [len(store.read("ended-long-ago", "1")) for store in stores] == [0, 1]


def take_signals(mine: World, theirs: World) -> None:
    mine.store.expect([RunRecord(RunKey("a"), "step", "default", State.PENDING)])
    with pytest.raises(ForeignId):
        theirs.app.result("a").signal("go", 1)
    mine.app.result("a").signal("go", 2)
    stores = [waits_of(world.store, world.app.codec) for world in (mine, theirs)]
    assert [len(store.read("a").signals) for store in stores if store is not None] == [1, 0]
    other = waits_of(theirs.store, theirs.app.codec)
    assert other is not None
    outside = StoredOutside(other, theirs.store, "a")
    assert outside.signals(["go"], []) == []
    with pytest.raises(ForeignId):
        outside.child("a")
    assert signals._record(theirs.store, "a") is None
    assert theirs.app.sends.signals.wake("a") is False


def recording(mine: World, theirs: World) -> None:
    """Each writes what it did and how much waits; mine merges an hour of which both have rows."""
    past = hour_of(time.time()) - 3
    histories = []
    for world in (mine, theirs):
        recorder = Recorder(SYSTEM_CLOCK)
        recorder.ended("default", "step", State.SUCCEEDED, 0.5)
        world.app.broker.declare("default")
        looks = BacklogLooks(world.app.broker, ["default"], SYSTEM_CLOCK)
        author = Author("w", 0, "1")
        recordings = Recording(recorder, author, "w!1", looks, SYSTEM_CLOCK, 0.0)
        write = recordings.write_due(world.store, SYSTEM_CLOCK.monotonic())
        history = history_of(world.store)
        assert write is not None
        assert history is not None
        write()
        look = recordings.look_due(world.store, SYSTEM_CLOCK.monotonic())
        assert look is not None
        look()  # a look of the other one is none of its own
        assert [*Backlogs(history).newest(time.time())] == ["default"]
        series = {("default", "step"): {past * HOUR: Tally(succeeded=1)}}
        hour = Hour(Author("w", past * HOUR, "1"), series)
        history.write("w!1", past * HOUR, hour, past * HOUR + 1.0)
        histories.append(history)
        if world is mine:
            merge = recordings.merge_due(world.store, SYSTEM_CLOCK.monotonic())
    assert merge is not None
    merge()
    merged = [len(each.days(TASKS, past // 24, past // 24 + 1)) for each in histories]
    assert merged == [1, 0]
    written = [len(each.hours(past, past + 5)) for each in histories]
    assert written == [2, 2]
    assert [each.following() > past for each in histories] == [True, False]


def table_results(mine: World, theirs: World) -> None:
    """The rows of `aztask.spark.results`: a key whose id another app uses is unaccounted."""
    module = pytest.importorskip("aztask.spark.submission.results")
    look_up = module.LookUp(module.Target(), "one", module.pa.string(), as_json=True)
    task_id = module.id_maker("one")("key")
    ended(mine, task_id)
    (row,) = look_up._rows(theirs.app, theirs.store, [task_id])
    assert (row["state"], "value" in row) == ("unaccounted", False)
    assert row["problem"]
    assert look_up._rows(mine.app, mine.store, [task_id])[0]["state"] == "succeeded"


def unaccounted(mine: World, theirs: World) -> None:
    """A run of another app is none that the log lacks."""
    module = pytest.importorskip("aztask.spark.events.unaccounted")
    ended(mine, "one")
    assert [run[0] for run in module.started_between(mine.store, 0.0, math.inf, 10)] == ["one"]
    assert module.started_between(theirs.store, 0.0, math.inf, 10) == []


SCENARIOS: dict[str, Scenario] = {
    "aztask.spark.events.unaccounted.started_between": unaccounted,
    "aztask.spark.submission.results.LookUp": table_results,
    "aztask.operate.draining.wait_until_idle": drain,
    "aztask.operate.tasks._readable": list_recent,
    "aztask.operate.search._listed": list_runs,
    "aztask.operate.search._unreadable": list_runs,
    "aztask.operate.stepcheck._records": list_runs,
    "aztask.operate.workers._records": list_workers,
    "aztask.operate.workers.heartbeats": list_workers,
    "aztask.operate.owners._is_signed": adoption,
    "aztask.operate.owners.owned_parts": adoption,
    "aztask.operate.owners.owners_of": adoption,
    "aztask.operate.owners.owner_findings": owner_findings,
    "aztask.celery.embedded.chords.Chords": chords,
    "aztask.result.AsyncResult": async_result,
    "aztask.stores.records.watcher.ResultWatcher": watcher,
    "aztask.operate.overview.Reader": top,
    "aztask.steps.keepers.StoredOutside": take_signals,
    "aztask.steps.keeping.StepPurge": step_purge,
    "aztask.steps.signals.TaskSignals": take_signals,
    "aztask.steps.signals._record": take_signals,
    "aztask.worker.pipeline.settling.Refusals": refusals,
    "aztask.worker.upkeep.housekeeping.Housekeeping": housekeeping,
    "aztask.worker.upkeep.heartbeat.LostRuns": lost_runs,
    "aztask.worker.upkeep.recording.Recording": recording,
    "aztask.workflows.documents.Documents": documents,
    "aztask.workflows.engine.WorkflowEngine": workflow_engine,
    "aztask.workflows.graph.Graphs": graphs,
    "aztask.workflows.inputs.Inputs": inputs,
    "aztask.workflows.joins.Joins": joins,
}

EXEMPT = {
    "aztask.spark.events.unaccounted.unaccounted_by_task": "passes the store to unaccounted_runs",
    "aztask.spark.events.unaccounted.unaccounted_runs": "passes the store to started_between",
    "aztask.stores.payloads.holders.PayloadHolders": "it changes nothing; what others need stays",
    "aztask.app.app.App": "it holds the store",
    "aztask.stores.connections.Connections": "it opens the store",
    "aztask.operate.findings.store_text": "it says how large the whole store is",
    "aztask.stores.records.watcher.watcher_of": "it makes a ResultWatcher",
    "aztask.operate.move.kinds._number": "it counts rows of one owner, and a whole store",
    "aztask.workflows.engine.engine_for": "it makes a WorkflowEngine",
}
