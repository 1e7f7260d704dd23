"""The dispatcher between a worker's stages, which are real, and a pool that is made up."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest
from pipelinebench import Bench, make_bench
from runtimes import Noting

from aztask.hooks import Hooks
from aztask.queues.engine import Database
from aztask.queues.lease.state import LeaseState
from aztask.settlement import Abandon, Complete, DeadLetter, Resubmit
from aztask.stores.records.base import State
from aztask.worker.pipeline.work import Stage, Stop, WorkItem, message_of
from aztask.worker.pool.dispatcher import PoolDispatcher
from aztask.worker.pool.leaseguard import NO_NEWS

NOW = 1_000_000.0


@dataclass(eq=False)
class Process:
    """A pool process. packets: its answers, in order. unread: what it can be asked to give back."""

    items: dict[int, WorkItem] = field(default_factory=dict)
    ran: int = 0
    packets: list[list[Any]] = field(default_factory=list)
    told: list[list[Any]] = field(default_factory=list)
    unread: list[WorkItem] = field(default_factory=list)
    ready: bool = False
    retiring: bool = False
    culprit: int | None = None
    outbox: object = field(default_factory=object)
    hung_up: bool = False
    unwatched: bool = False

    @property
    def link(self) -> Process:
        """It is its own link to the worker."""
        return self

    def answers(self) -> list[list[Any]]:
        packets, self.packets = self.packets, []
        return packets

    def tell(self, packet: list[Any]) -> None:
        self.told.append(packet)

    def take_back(self) -> list[WorkItem]:
        for item in self.unread:
            del self.items[item.number]
            item.taken_back()
        return self.unread

    def kill(self, reason: str, culprit: int | None = None) -> None:
        self.culprit = culprit

    def ending(self) -> str:
        return "the pool process was ended by SIGKILL"

    def __str__(self) -> str:
        return "pool process 7"


@dataclass
class Pool:
    """What the dispatcher asks of a pool. space: how many deliveries it takes."""

    space: int = 0
    processes: list[Process] = field(default_factory=list)
    sent: list[list[Any]] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)
    calls: list[Any] = field(default_factory=list)
    over: list[Process] = field(default_factory=list)
    started: list[Process] = field(default_factory=list)
    takes: int = 1000

    def room(self) -> int:
        return self.space

    def feed(
        self, items: list[WorkItem], packet: Callable[[WorkItem], list[Any]], aside: Any
    ) -> Any:
        self.calls.append("feed")
        for item in items[: self.takes]:
            self.sent.append(packet(item))
            item.sent()
            self.processes[0].items[item.number] = item
        return items[self.takes :]

    def observe(self, seconds: float) -> None:
        self.seconds.append(seconds)

    def fill(self) -> list[Process]:
        self.calls.append("fill")
        started, self.started = self.started, []
        return started

    def ended(self, process: Process) -> None:
        self.calls.append(("ended", process))

    def take_ended(self) -> list[Process]:
        over, self.over = self.over, []
        return over


@dataclass(eq=False)
class Requests:
    """Notes what tasks ask for."""

    asked: list[Any] = field(default_factory=list)

    def answer(self, *request: Any) -> None:
        self.asked.append(request)


class Selector:
    """Notes what is watched; `fire` does what the loop does when something can be read."""

    def __init__(self) -> None:
        self.watched: dict[Any, Any] = {}

    def watch(self, source: Any, act: Callable[[], None]) -> None:
        self.watched[source] = act

    def unwatch(self, source: Any) -> None:
        del self.watched[source]

    def fire(self, source: Any) -> None:
        self.watched[source]()


class Worker(Noting):
    """A dispatcher with all around it; it notes what the dispatcher hands on."""

    def __init__(self, bench: Bench) -> None:
        super().__init__(confines=True)
        self.bench = bench
        self.pool, self.selector = Pool(), Selector()
        requests: Any = Requests()
        self.asked = requests.asked
        pool: Any = self.pool
        selector: Any = self.selector
        self.hooks = Hooks()
        runtime: Any = SimpleNamespace(
            mailbox=selector,
            deliveries=bench.deliveries,
            clock=bench.clock,
            app=SimpleNamespace(hooks=self.hooks),
        )
        self.dispatcher = PoolDispatcher(runtime, pool, bench.pipeline, requests, self)
        self.process = self.start()

    def start(self) -> Process:
        process = Process()
        self.pool.processes.append(process)
        self.pool.started.append(process)
        self.dispatcher.fill()
        self.pool.calls.clear()
        return process

    def running(self, *ids: str) -> list[WorkItem]:
        """Tasks that run in the first process."""
        items = self.bench.claimed(*ids)
        for item in items:
            item.sent()
            self.process.items[item.number] = item
        return items

    def answer(self, *packets: list[Any]) -> None:
        self.process.packets += packets
        self.selector.fire(self.process.outbox)


Make = Callable[..., Worker]


@pytest.fixture
def make() -> Iterator[Make]:
    databases: set[Database] = set()
    yield lambda **options: Worker(make_bench(databases, **options))
    for database in databases:
        database.close()


def record(settle: str = "resubmit", **fields: Any) -> dict[str, Any]:
    """A decision as a pool process sends it."""
    return {"settle": settle, **fields}


# -- feeding -----------------------------------------------------------------------------------


def test_ready_deliveries_are_sent_as_far_as_there_is_room(make: Make) -> None:
    worker = make()
    items = worker.bench.claimed(*"abc")
    worker.bench.deliveries.ready.extend(items)
    worker.dispatcher.feed()
    assert worker.pool.sent == [], "there is no room"
    assert worker.pool.calls == []
    worker.pool.space = 2
    worker.dispatcher.feed()
    assert [packet[0] for packet in worker.pool.sent] == [items[0].number, items[1].number]
    assert [item.stage for item in items] == [Stage.RUNNING, Stage.RUNNING, Stage.READY]
    assert list(worker.bench.deliveries.ready) == [items[2]]


def test_nothing_ready_is_nothing_sent(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    worker = make()
    worker.pool.space = 2
    calls: list[Any] = []
    monkeypatch.setattr(worker.pool, "feed", lambda *each: calls.append(each))
    worker.dispatcher.feed()
    assert calls == []


def test_more_room_than_deliveries_is_left_over(make: Make) -> None:
    worker = make()
    worker.bench.deliveries.ready.extend(worker.bench.claimed(*"ab"))
    worker.pool.space = 5
    worker.dispatcher.feed()
    assert len(worker.pool.sent) == 2


def test_a_packet_holds_what_a_run_needs(make: Make) -> None:
    worker = make()
    (item,) = worker.bench.claimed("a")
    item.delivery.delivery_count = 3
    worker.bench.deliveries.ready.append(item)
    worker.pool.space = 1
    worker.dispatcher.feed()
    assert worker.pool.sent == [
        [
            item.number,
            item.message_fields(),
            3,
            item.delivery.deadline,
            item.delivery.enqueued_at,
        ]
    ]
    assert message_of(item).id in worker.pool.sent[0][1]


def test_what_is_gone_already_has_no_deadline(make: Make) -> None:
    worker = make(task={"delivery": "at-most-once"})
    (item,) = worker.bench.claimed("a")
    worker.bench.clock.now += 10_000.0
    worker.bench.deliveries.ready.append(item)
    worker.pool.space = 1
    worker.dispatcher.feed()
    assert worker.pool.sent[0][3] == 1e18
    assert worker.done == []


@pytest.mark.parametrize(("left", "runs"), [(0.001, True), (0.0, False)])
def test_what_lapsed_while_it_waited_never_runs(make: Make, left: float, runs: bool) -> None:
    worker = make()
    items = worker.bench.claimed(*"ab")
    items[0].delivery.deadline = worker.bench.clock.now + left
    worker.bench.deliveries.ready.extend(items)
    worker.pool.space = 1
    worker.dispatcher.feed()
    assert [packet[0] for packet in worker.pool.sent] == [items[0 if runs else 1].number]
    assert worker.done == ([] if runs else [items[0]])
    assert [kind for kind, _ in items[0].notes] == ([] if runs else ["lease_lost"])
    assert not items[0].settled


def test_what_found_no_process_goes_back_in_front(make: Make) -> None:
    worker = make()
    items = worker.bench.claimed(*"abc")
    worker.bench.deliveries.ready.extend(items)
    worker.pool.space, worker.pool.takes = 3, 1
    worker.dispatcher.feed()
    assert list(worker.bench.deliveries.ready) == items[1:]
    assert [item.stage for item in items] == [Stage.RUNNING, Stage.READY, Stage.READY]


def test_only_the_process_that_runs_it_is_told(make: Make) -> None:
    worker = make()
    other = worker.start()
    (item,) = worker.running("a")
    worker.dispatcher.tell(item, ["renewed", item.number, 5.0])
    assert (worker.process.told, other.told) == ([["renewed", item.number, 5.0]], [])


# -- answers -----------------------------------------------------------------------------------


def test_a_run_that_returned_is_finished(make: Make) -> None:
    worker = make()
    items = worker.running(*"ab")
    worker.answer(
        ["done", items[0].number, NOW + 1.0, 0.25, b"\x01"],
        ["done", items[1].number, NOW + 2.0, 0.5, None],
    )
    assert worker.to_finish == items
    assert worker.process.items == {}
    assert [item.settlement for item in items] == [Complete()] * 2
    first = items[0].outcome
    assert first is not None
    assert (first.state, first.value, first.duration) == (State.SUCCEEDED, b"\x01", 0.25)
    assert items[0].run is not None
    assert (items[0].run.started_at, items[0].run.duration) == (NOW + 1.0, 0.25)
    assert worker.pool.seconds == [0.25, 0.5]


def test_a_run_that_raised_is_what_its_process_decided(make: Make) -> None:
    worker = make()
    items = worker.running(*"ab")
    worker.answer(
        ["failed", items[0].number, NOW, 0.25, record(delay=3.0), "OSError", "full", "trace"],
        ["failed", items[1].number, NOW, 0.5, record("dead-letter", reason="no"), "E", "e", ""],
    )
    assert worker.to_finish == items
    assert [item.settlement for item in items] == [Resubmit(3.0, NOW + 3.0), DeadLetter("no")]
    outcome = items[0].outcome
    assert outcome is not None
    assert (outcome.state, outcome.error_type, outcome.error) == (State.RETRYING, "OSError", "full")
    assert (outcome.traceback, outcome.duration) == ("trace", 0.25)


@pytest.mark.parametrize(
    ("kind", "details", "state"),
    [
        ("done", [b"\x01"], State.SUCCEEDED),  # it was faster
        ("failed", [record(delay=3.0), "E", "e", ""], State.CANCELLED),
        ("lost", [], State.CANCELLED),
    ],
)
def test_a_cancelled_run_is_cancelled_unless_it_returned(
    make: Make, kind: str, details: list[Any], state: State
) -> None:
    worker = make()
    (item,) = worker.running("a")
    assert item.run is not None
    item.run.cancelled = True
    worker.answer([kind, item.number, NOW, 0.25, *details])
    assert worker.to_finish == [item]
    assert item.outcome is not None
    assert (item.outcome.state, item.settlement) == (state, Complete())


def test_an_answer_for_what_is_over_is_dropped(make: Make) -> None:
    worker = make()
    (item,) = worker.running("a")
    item.end()
    worker.answer(["done", item.number, NOW, 0.25, b""])
    assert (worker.to_finish, worker.done) == ([], [])
    assert item.decided is None


def test_an_answer_for_what_it_does_not_run_is_dropped(make: Make) -> None:
    worker = make()
    (item,) = worker.running("a")
    worker.answer(["done", 99, NOW, 0.25, b""], ["done", item.number, NOW, 0.5, b""])
    assert worker.to_finish == [item]
    assert worker.pool.seconds == [0.5]


def test_a_process_that_is_ready_may_be_fed_and_the_next_is_started(make: Make) -> None:
    worker = make()
    worker.answer(["ready"])
    assert worker.process.ready
    assert worker.pool.calls == ["fill"]


def test_a_process_that_cannot_start_says_why(make: Make, caplog: pytest.LogCaptureFixture) -> None:
    worker = make()
    worker.answer(["broken", "no module named shop"])
    assert "no module named shop" in caplog.text
    assert not worker.process.ready
    assert worker.asked == []


def test_what_tasks_ask_for_is_passed_on(make: Make) -> None:
    worker = make()
    worker.answer(["extend", 1, 60.0], ["save", 2, b"page 7"])
    assert worker.asked == [
        (worker.process, "extend", 1, 60.0),
        (worker.process, "save", 2, b"page 7"),
    ]


# -- runs that gave up their lease -------------------------------------------------------------


def test_a_run_that_stopped_for_its_lost_lease_is_over(make: Make) -> None:
    """Nothing is recorded, nothing settled: another worker has it, or will."""
    worker = make()
    (item,) = worker.running("a")
    assert item.run is not None
    item.run.stop = Stop("the broker says so", NOW + 1.0)
    worker.bench.keeper.begin(item.lease)
    worker.bench.keeper.lapse(item.lease, "lost")
    worker.answer(["lost", item.number, NOW, 0.25])
    assert (worker.done, worker.to_finish) == ([item], [])
    assert item.notes == [("lease_lost", "the broker says so")]
    assert item.decided is None


@pytest.mark.parametrize(("left", "abandoned"), [(0.001, True), (0.0, False)])
def test_a_run_that_stopped_under_a_lease_that_holds_is_abandoned(
    make: Make, left: float, abandoned: bool
) -> None:
    """It reached `max_lease`: the message need not wait for the lease's end."""
    worker = make()
    (item,) = worker.running("a")
    item.delivery.deadline = worker.bench.clock.now + left
    worker.answer(["lost", item.number, NOW, 0.25])
    assert (worker.to_finish, worker.done) == (([item], []) if abandoned else ([], [item]))
    if abandoned:
        assert (item.settlement, item.outcome) == (Abandon(), None)
    assert [kind for kind, _ in item.notes] == ["lease_lost"]


def test_at_most_once_a_run_that_gave_up_is_over(make: Make) -> None:
    worker = make(task={"delivery": "at-most-once"})
    (item,) = worker.running("a")
    worker.answer(["lost", item.number, NOW, 0.25])
    assert worker.done == [item]


# -- processes that end ------------------------------------------------------------------------


def ends(worker: Worker, process: Process) -> None:
    """The pool says that a process has ended."""
    worker.pool.over = [process]
    worker.dispatcher.bury()


def test_what_a_process_had_not_read_goes_on_and_what_it_ran_has_failed(make: Make) -> None:
    worker = make()
    one, two, three = worker.running(*"abc")
    assert one.run is not None
    one.run.started_at = NOW - 4.0
    worker.process.unread = [two, three]
    ends(worker, worker.process)
    assert list(worker.bench.deliveries.ready) == [two, three]
    assert [item.stage for item in (two, three)] == [Stage.READY] * 2
    assert worker.to_finish == [one]
    assert worker.process.items == {}
    assert one.outcome is not None
    assert one.outcome.error_type == "WorkerCrashed"
    assert one.outcome.error == "the pool process was ended by SIGKILL"
    assert one.outcome.duration == 4.0
    assert worker.process.outbox not in worker.selector.watched
    assert worker.pool.calls == [("ended", worker.process), "fill"]


def test_the_last_answers_of_a_process_count(make: Make) -> None:
    worker = make()
    one, two = worker.running(*"ab")
    worker.process.packets = [["done", one.number, NOW, 0.25, b"\x01"]]
    ends(worker, worker.process)
    assert worker.to_finish == [one, two]
    assert [item.outcome.state for item in (one, two)] == [State.SUCCEEDED, State.RETRYING]


def test_a_run_that_had_not_started_has_no_duration(make: Make) -> None:
    worker = make()
    (item,) = worker.running("a")
    ends(worker, worker.process)
    assert item.outcome is not None
    assert item.outcome.duration == 0.0


def test_of_a_killed_process_the_culprit_failed_and_its_siblings_are_given_back(
    make: Make,
) -> None:
    worker = make()
    one, two, three = worker.running(*"abc")
    worker.process.culprit = two.number
    ends(worker, worker.process)
    assert worker.to_finish == [two]
    assert two.outcome is not None
    assert two.outcome.error_type == "TimeLimitExceeded"
    assert worker.done == [one, three]
    assert worker.bench.stats() == (2, 1, 0, 0)
    assert [worker.bench.app.results.get(each).starts for each in "abc"] == [0, 1, 0]


@pytest.mark.parametrize(("culprit", "kind"), [(True, "TaskKilled"), (False, "WorkerCrashed")])
def test_the_hook_gets_runs_that_their_process_could_not_report(
    make: Make, culprit: bool, kind: str
) -> None:
    worker = make()
    killed: list[Any] = []
    worker.hooks.killed(killed.append)
    (item,) = worker.running("a")
    assert item.run is not None
    item.run.started_at = worker.bench.clock.monotonic() - 3.0
    worker.process.culprit = item.number if culprit else None
    ends(worker, worker.process)
    (run,) = killed
    assert (run.message.id, run.delivery, run.error_type) == ("a", item.delivery, kind)
    assert run.ended_at == worker.bench.clock.wall()
    assert run.ended_at - run.started_at == pytest.approx(3.0)
    assert "ended by SIGKILL" in run.error


def test_at_most_once_a_sibling_says_why_it_failed(make: Make) -> None:
    worker = make(task={"delivery": "at-most-once"})
    one, two = worker.running(*"ab")
    worker.process.culprit = two.number
    ends(worker, worker.process)
    outcome = worker.bench.app.results.get("a").outcome
    assert outcome.error_type == "Interrupted"
    assert "ended by SIGKILL" in outcome.error
    assert one.stage is Stage.ENDED


def test_a_cancelled_run_whose_process_was_killed_is_cancelled(make: Make) -> None:
    worker = make()
    (item,) = worker.running("a")
    assert item.run is not None
    item.run.cancelled, item.run.stop = True, Stop("it was cancelled", NOW)
    worker.process.culprit = item.number
    ends(worker, worker.process)
    assert worker.to_finish == [item]
    assert item.outcome is not None
    assert item.outcome.state is State.CANCELLED


def test_a_run_that_was_killed_for_its_lost_lease_is_over(make: Make) -> None:
    worker = make()
    (item,) = worker.running("a")
    assert item.run is not None
    item.run.stop = Stop("its lease was not renewed in time", NOW)
    item.lease.state = LeaseState.LOST
    worker.process.culprit = item.number
    ends(worker, worker.process)
    assert (worker.to_finish, worker.done) == ([], [item])
    assert item.notes == [("lease_lost", "its lease was not renewed in time")]


@pytest.mark.parametrize("ended", [False, True])
def test_a_run_that_its_own_process_stopped_is_over(
    make: Make, caplog: pytest.LogCaptureFixture, ended: bool
) -> None:
    """This worker was stopped (SIGSTOP) past the lease: the pool process acted alone."""
    worker = make()
    one, two = worker.running(*"ab")
    worker.bench.keeper.begin(one.lease)
    worker.bench.keeper.lapse(one.lease, "lost")
    worker.process.packets = [["overdue", one.number, False]]
    if ended:
        worker.process.packets.append(["overdue", one.number, True])
        ends(worker, worker.process)
        assert worker.process.culprit == one.number
        assert worker.done == [one, two], "the task beside it is given back"
        assert two.notes == []
    else:
        worker.answer(["lost", one.number, NOW, 0.25])
        assert worker.done == [one]
    assert worker.to_finish == []
    assert one.notes == [("lease_lost", NO_NEWS)]
    assert caplog.text.count("its process interrupted it, it will be redelivered") == 1


def test_a_stop_that_was_announced_for_what_it_does_not_run_is_ignored(make: Make) -> None:
    worker = make()
    worker.answer(["overdue", 99, True])
    assert (worker.to_finish, worker.done, worker.process.culprit) == ([], [], None)


def test_a_run_that_was_killed_at_its_max_lease_has_failed_and_counts(make: Make) -> None:
    worker = make()
    (item,) = worker.running("a")
    assert item.run is not None
    item.run.stop = Stop("it would hold its message for too long", NOW, failed=True)
    worker.process.culprit = item.number
    ends(worker, worker.process)
    assert (worker.to_finish, worker.done) == ([item], [])
    assert item.outcome is not None
    assert item.outcome.state is State.RETRYING
    assert item.outcome.error_type == "MaxLeaseExceeded"
    assert isinstance(item.settlement, Resubmit)
    assert item.settlement.counted
    assert item.notes == []


def test_what_was_over_before_its_process_ended_stays_so(make: Make) -> None:
    worker = make()
    (item,) = worker.running("a")
    item.end()
    ends(worker, worker.process)
    assert (worker.to_finish, worker.done, item.decided) == ([], [], None)


def test_with_the_fork_server_all_of_its_processes_have_ended(make: Make) -> None:
    worker = make()
    (item,) = worker.running("a")
    ends(worker, worker.process)
    assert worker.to_finish == [item]


@pytest.mark.parametrize(
    ("retiring", "runs", "warned"),
    [(True, False, False), (True, True, True), (False, False, True)],
)
def test_an_end_that_was_not_asked_for_is_logged(
    make: Make, caplog: pytest.LogCaptureFixture, retiring: bool, runs: bool, warned: bool
) -> None:
    worker = make()
    if runs:
        worker.running("a")
    worker.process.retiring = retiring
    ends(worker, worker.process)
    assert ("SIGKILL" in caplog.text) is warned


def test_a_delivery_that_missed_its_slot_is_taken_back(make: Make) -> None:
    worker = make()
    (item,) = worker.running("a")
    worker.answer(["late", item.number])
    assert worker.missed == [item]
    assert (item.stage, item.run) == (Stage.READY, None)
    assert item.number not in worker.process.items
    worker.answer(["late", item.number])
    assert worker.missed == [item], "an answer about another delivery is ignored"
