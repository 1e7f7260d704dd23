"""Workflows as schedules: packed and read again, started once, and waited for by ``overlap``."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import msgpack
import pytest

from aztask import App, chain, chord, group
from aztask.context import SCHEDULE, SCHEDULED_AT
from aztask.errors import UnknownTask
from aztask.queues.local.payload import envelope_of
from aztask.schedules.graphs import GraphReader, later, pack_graph
from aztask.schedules.stored import DUE, SENT, SKIPPED, WAITING
from aztask.schedules.template import SPEC
from aztask.stores.records.base import State
from aztask.stores.records.damage import Columns, Damaged
from aztask.workflows.edits import RootEdit
from aztask.workflows.graphs import Graph, calls_of

AT = datetime(2026, 11, 1, 4, tzinfo=UTC)


@pytest.fixture
def app(tmp_path: Path) -> Iterator[App]:
    address = f"local://{tmp_path}/queues.db"
    made = App("shop", broker=address, results=address)

    @made.task(name="fetch", queue="net")
    def fetch(day: datetime | int) -> Any:
        return [day]

    @made.task(name="store")
    def store(rows: list[Any], *, table: str = "t") -> int:
        return len(rows)

    @made.task(name="alarm")
    def alarm(failures: Any) -> None:
        """Called if something failed."""

    yield made
    made.close()


def graphs(app: App) -> dict[str, Graph]:
    fetch, store, alarm = (app.tasks[name] for name in ("fetch", "store", "alarm"))
    call = fetch.s(AT).with_options(delay=5, queue="slow")
    return {
        "chain": call | store.s(table="x"),
        "handlers": chain(group(fetch.s(1), on_error=alarm.s()), store.s(), on_error=alarm.s()),
        "chord": chord([fetch.s(1), chain(fetch.s(2), store.s())], store.s(), return_errors=True),
        "immutable": chain(fetch.si(1), fetch.si(2)),
        "empty header": chord([], store.s()),
    }


NAMES = ["chain", "handlers", "chord", "immutable", "empty header"]


@pytest.mark.parametrize("name", NAMES)
def test_a_graph_is_read_as_it_was_packed(app: App, name: str) -> None:
    graph = graphs(app)[name]
    assert GraphReader(app.codec, app.tasks).read(pack_graph(app.codec, graph)) == graph


@pytest.mark.parametrize(
    "found",
    [
        *[None, 7, [], [1], [2, ["task"]], [1, ["task", "fetch"]], [1, ["loop", [], None]]],
        *[[1, ["chain", 7, None]], [1, ["chord", ["chain", [], None], None, False, None]]],
        [1, ["chain", [], ["group", [], None]]],
        [1, ["task", "fetch", b"", 1, "", {}, False]],
        [1, ["task", "fetch", b"", "", "", [], False]],
    ],
)
def test_a_damaged_graph_is_damaged(app: App, found: Any) -> None:
    with pytest.raises(Damaged):
        GraphReader(app.codec, app.tasks).read(msgpack.packb(found))
    with pytest.raises(Damaged):
        GraphReader(app.codec, app.tasks).read(b"\xc1")


def test_a_task_that_the_app_does_not_have_is_named(app: App) -> None:
    data = pack_graph(app.codec, graphs(app)["chain"])
    with pytest.raises(UnknownTask, match="this app has no task 'fetch'"):
        GraphReader(app.codec, {}).read(data)


def test_what_starts_at_once_is_what_is_delayed(app: App) -> None:
    def delays(graph: Graph) -> list[Any]:
        return [call.options.get("delay") for call in calls_of(later(graph, 3.0))]

    found = graphs(app)
    assert delays(found["chain"]) == [8.0, None]
    assert delays(found["handlers"]) == [3.0, None]
    assert delays(found["chord"]) == [3.0, 3.0, None, None]
    assert delays(found["empty header"]) == [3.0]
    assert later(found["chord"], 0.0) is found["chord"]


def test_the_occurrence_is_a_workflow_under_its_id(app: App) -> None:
    app.schedules.create("import", graphs(app)["chain"], at=datetime(2100, 1, 1, tzinfo=UTC))
    workflow = app.schedules.trigger("import")
    assert workflow is not None
    assert app.workflows.result(workflow).state == "started"
    (peeked,) = app.broker.peek("slow")
    assert peeked.envelope.headers[SCHEDULE] == "shop.import"
    assert peeked.envelope.headers[SCHEDULED_AT] > 0


@dataclass
class Feed:
    folder: Path
    since: timedelta


@pytest.mark.parametrize("strict", [True, False])
def test_arguments_are_converted_once(
    app: App, strict: bool, caplog: pytest.LogCaptureFixture
) -> None:
    """The definition holds plain data, which a strict task refuses in the place of a value."""
    got: list[Any] = []

    @app.task(name="read", strict=strict)
    def read(feed: Feed, kinds: frozenset[str]) -> Feed:
        got.append((feed, kinds))
        return feed

    @app.task(name="keep", strict=strict)
    def keep(feed: Feed, *, target: Path) -> None:
        got.append((feed, target))

    feed = Feed(Path("in"), timedelta(hours=2))
    graph = read.s(feed, frozenset("a")) | keep.s(target=Path("out"))
    with app.inline() as inline:
        app.schedules.create("import", graph, every=60)
        workflow = app.schedules.trigger("import")
        inline.run()
        assert workflow is not None
        assert app.workflows.result(workflow).state == "succeeded"
    assert got == [(feed, frozenset("a")), (feed, Path("out"))]
    assert not caplog.records


def test_an_occurrence_whose_worker_died_is_started_once(app: App) -> None:
    app.schedules.create("import", graphs(app)["immutable"], every=60)
    engine = app.schedules.engine
    view = app.schedules.view("import")
    assert view is not None
    made = _fired(app, view)
    assert [engine.send(view, made).state for _ in range(2)] == [SENT, SENT]
    assert app.broker.stats("net").active == 1


def _fired(app: App, view: Any) -> Any:
    """The one occurrence that is due a minute later."""
    engine = app.schedules.engine
    engine.store.now = lambda: view.schedule.watermark + 61.0  # type: ignore[method-assign]
    fired = engine.fire(view, "w")
    assert fired is not None
    return next(each for each in fired.open if each.state == DUE)


@pytest.mark.parametrize(("overlap", "then"), [("skip", SKIPPED), ("queue", WAITING)])
def test_overlap_waits_for_the_whole_workflow(app: App, overlap: Any, then: str) -> None:
    """Its first task has ended long before."""
    app.schedules.create("import", graphs(app)["immutable"], every=60, overlap=overlap)
    engine = app.schedules.engine
    workflow = app.schedules.trigger("import")
    assert workflow is not None
    assert engine.runs(workflow)
    assert not engine.runs(workflow, old=True), "after overlap_limit it counts as lost"
    view = app.schedules.view("import")
    assert view is not None
    last = replace(view.schedule, last_id=workflow, last_at=engine.store.now())
    started = engine.commit(view, last, ())
    assert started is not None
    at = started.schedule.watermark + 61.0
    engine.store.now = lambda: at  # type: ignore[method-assign]
    fired = engine.fire(started, "w")
    assert fired is not None
    rows = engine.history("shop.import", 5)
    assert [each.state for each in rows if each.kind == "schedule"] == [then]
    ended = RootEdit(workflow, lambda root: replace(root, ended_at=1.0, state=State.SUCCEEDED))
    app.workflows.engine.documents.change([ended])
    assert not engine.runs(workflow)


def test_a_release_that_knows_no_workflows_sends_nothing(app: App) -> None:
    """It misses the queue, calls the schedule damaged, and leaves it to newer workers."""
    app.schedules.create("import", graphs(app)["chain"], every=60)
    view = app.schedules.view("import")
    assert view is not None
    spec = msgpack.unpackb(envelope_of(view.schedule.template).headers[SPEC])
    with pytest.raises(Damaged, match="queue"):
        Columns(spec).text("queue")
