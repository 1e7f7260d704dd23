"""What a running task asks for: longer leases, checkpoints, the state of its session."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from types import SimpleNamespace
from typing import Any

import pytest
from pipelinebench import LEASE, BadBroker, Bench, make_bench

from aztask.errors import BrokerUnavailable, LeaseLost, MessageTooLarge
from aztask.queues.delivery import Lost, Renewed, Unknown
from aztask.queues.engine import Database
from aztask.queues.lease.state import LeaseState
from aztask.worker.lane import lane_of
from aztask.worker.mailbox import EventMailbox
from aztask.worker.pipeline.work import WorkItem, message_of
from aztask.worker.pool.leaseguard import NO_DEADLINE
from aztask.worker.pool.requests import RETRY_RESERVE, TaskRequests

NOW = 1_000_000.0
LIMIT = NOW + 7000.0


class WithoutUpdate(BadBroker):
    """The local broker, declared to be one that cannot change a message: as Service Bus."""

    @property
    def capabilities(self) -> Any:
        return replace(super().capabilities, update=False)


@dataclass
class Process:
    """A pool process that one task runs in."""

    items: dict[int, WorkItem] = field(default_factory=dict)
    told: list[list[Any]] = field(default_factory=list)

    def tell(self, packet: list[Any]) -> None:
        self.told.append(packet)


class Holder:
    """The receiver of a session."""

    def __init__(self, inner: Any) -> None:
        self._inner = inner
        self.states: dict[str, bytes | None] = {"s1": b"page 7"}
        self.error: Exception | None = None

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def let_go(self) -> None: ...

    def session_state(self, session: str) -> bytes | None:
        if self.error:
            raise self.error
        return self.states[session]

    def set_session_state(self, session: str, state: bytes | None) -> None:
        if self.error:
            raise self.error
        self.states[session] = state


class Worker:
    """One running task, and what answers it."""

    def __init__(self, bench: Bench, threads: int) -> None:
        self.bench = bench
        self.process: Any = Process()
        self.extended: list[Any] = []
        limits: Any = SimpleNamespace(limit_at=lambda item: LIMIT)
        self.mailbox = EventMailbox()
        runtime: Any = SimpleNamespace(
            app=bench.app, keeper=bench.keeper, clock=bench.clock, lane_threads=threads,
            lane=lambda name, work, threads: lane_of(name, work, self.mailbox, threads=threads),
        )  # fmt: skip
        self.requests = TaskRequests(runtime, limits)
        (self.item,) = bench.claimed("a")
        self.item.sent()
        self.process.items[self.item.number] = self.item

    def ask(self, kind: str, *details: Any) -> list[list[Any]]:
        self.requests.answer(self.process, kind, self.item.number, *details)
        told, self.process.told = self.process.told, []
        return told

    def answered(self, kind: str, *details: Any) -> tuple[str, Any]:
        """(error, value) of the one answer."""
        ((word, number, error, value),) = self.ask(kind, *details)
        assert (word, number) == ("answer", self.item.number)
        return error, value

    def in_session(self) -> Holder:
        holder: Any = Holder(self.item.receiver)
        self.item.receiver = holder
        self.item.delivery.session = "s1"
        return holder


Make = Callable[..., Worker]


@pytest.fixture
def make() -> Iterator[Make]:
    databases: set[Database] = set()
    workers: list[Worker] = []

    def make(threads: int = 0, **options: Any) -> Worker:
        workers.append(Worker(make_bench(databases, **options), threads))
        return workers[-1]

    yield make
    for worker in workers:
        worker.requests.stop()
    for database in databases:
        database.close()


# -- extensions --------------------------------------------------------------------------------


@pytest.mark.parametrize(("wanted", "seconds"), [(90.0, 90.0), (60.0, 60.0), (5.0, LEASE)])
def test_an_extension_is_asked_of_the_keeper(
    make: Make, monkeypatch: pytest.MonkeyPatch, wanted: float, seconds: float
) -> None:
    """Never for less than the lease, and up to `max_lease`."""
    worker = make()
    calls: list[Any] = []
    monkeypatch.setattr(worker.bench.keeper, "extend", lambda *each: calls.append(each))
    assert worker.ask("extend", wanted) == [], "the renewal tells it"
    assert calls == [(worker.item.lease, seconds, LIMIT)]


def test_an_extension_is_renewed_at_the_next_turn(make: Make) -> None:
    worker = make()
    worker.bench.clock.now += 10.0
    worker.ask("extend", 500.0)
    worker.bench.keeper.turn()
    assert worker.item.lease.deadline == NOW + 510.0
    assert worker.item.lease.limit_at == LIMIT


def test_at_most_once_there_is_no_lease_to_extend(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    worker = make()
    worker.item.settled = True
    calls: list[Any] = []
    monkeypatch.setattr(worker.bench.keeper, "extend", lambda *each: calls.append(each))
    assert worker.ask("extend", 500.0) == [["renewed", worker.item.number, NO_DEADLINE]]
    assert calls == []


def test_a_task_that_is_over_gets_no_answer(make: Make) -> None:
    worker = make()
    del worker.process.items[worker.item.number]
    assert worker.ask("extend", 500.0) == []
    assert worker.ask("save", b"page 7") == []
    assert worker.item.lease.limit_at is None


def test_an_unknown_question_gets_no_answer(make: Make) -> None:
    assert make().ask("else", b"") == []


# -- checkpoints in the message ----------------------------------------------------------------


def test_a_checkpoint_is_stored_with_the_message_and_renews_its_lease(make: Make) -> None:
    worker = make()
    worker.bench.clock.now += 20.0
    assert worker.answered("save", b"page 7") == ("", None)
    assert message_of(worker.item).saved == b"page 7", "a retry takes it along"
    assert worker.item.lease.deadline == NOW + 20.0 + LEASE
    worker.bench.clock.now += 10 * LEASE
    (again,) = worker.bench.again()
    assert message_of(again).saved == b"page 7", "and so does the next delivery"


def test_an_empty_checkpoint_is_one_too(make: Make) -> None:
    worker = make()
    worker.answered("save", b"page 7")
    assert worker.answered("save", None) == ("", None)
    worker.bench.clock.now += 10 * LEASE
    (again,) = worker.bench.again()
    assert message_of(again).saved == b""


@pytest.mark.parametrize("answer", [Lost("taken over"), Unknown("no answer")])
def test_a_checkpoint_under_a_lost_lease_is_not_stored(
    make: Make, monkeypatch: pytest.MonkeyPatch, answer: Any
) -> None:
    worker = make()
    monkeypatch.setattr(worker.bench.keeper, "update", lambda *_: answer)
    assert worker.answered("save", b"page 7") == ("lost", None)
    assert message_of(worker.item).saved is None


@pytest.mark.parametrize(
    ("error", "answer"),
    [
        (LeaseLost("gone"), "lost"),
        (MessageTooLarge("3 MB"), "too large: the checkpoint does not fit: 3 MB"),
        (BrokerUnavailable("no answer"), "no answer"),
        (ValueError("an SDK's bug"), "ValueError: an SDK's bug"),
    ],
)
def test_a_checkpoint_that_fails_says_why(
    make: Make, monkeypatch: pytest.MonkeyPatch, error: Exception, answer: str
) -> None:
    worker = make()

    def update(*_: Any) -> Any:
        raise error

    monkeypatch.setattr(worker.bench.keeper, "update", update)
    assert worker.answered("save", b"page 7") == (answer, None)
    assert message_of(worker.item).saved is None


def test_a_lease_that_is_lost_already_stores_nothing(make: Make) -> None:
    worker = make()
    worker.bench.keeper.begin(worker.item.lease)
    worker.bench.keeper.lapse(worker.item.lease, "gone")
    assert worker.item.lease.state is LeaseState.LOST
    assert worker.answered("save", b"page 7") == ("lost", None)


def test_a_checkpoint_leaves_room_for_what_a_retry_adds(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    worker = make()
    asked: list[Any] = []
    monkeypatch.setattr(
        worker.bench.app.broker, "check", lambda envelope, reserve: asked.append(reserve)
    )
    worker.answered("save", b"page 7")
    assert asked == [RETRY_RESERVE] == [1024]
    monkeypatch.undo()
    monkeypatch.setattr("aztask.queues.local.broker.MESSAGE_LIMIT", 2_000)
    error, _ = worker.answered("save", b"x" * 1_500)
    assert error.startswith("too large: ")


@pytest.mark.parametrize("gone", ["settled", "unread"])
def test_what_is_gone_already_cannot_hold_a_checkpoint(make: Make, gone: str) -> None:
    worker = make()
    if gone == "settled":
        worker.item.settled = True
    error, _ = worker.answered("save", b"page 7")
    assert (error == "") is (gone != "settled")
    worker.item.opened = None
    assert "at-most-once" in worker.requests._save(worker.item, b"")


# -- checkpoints in the result store -----------------------------------------------------------


def test_where_a_message_cannot_be_changed_the_store_keeps_the_checkpoint(make: Make) -> None:
    worker = make(kind=WithoutUpdate)
    deadline = worker.item.lease.deadline
    assert worker.answered("save", b"page 7") == ("", None)
    assert message_of(worker.item).saved == b"page 7"
    assert worker.item.lease.deadline == deadline
    worker.bench.clock.now += 10 * LEASE
    (again,) = worker.bench.again()
    assert message_of(again).saved == b"page 7"
    assert worker.answered("save", b"page 8") == ("lost", None), "another one owns the run"


def test_without_a_store_there_is_no_place_for_it(make: Make) -> None:
    worker = make(kind=WithoutUpdate, results=False)
    error, _ = worker.answered("save", b"page 7")
    assert "result store" in error
    assert message_of(worker.item).saved is None


@pytest.mark.parametrize(
    ("error", "answer"),
    [(BrokerUnavailable("away"), "away"), (LeaseLost("gone"), "lost")],
)
def test_a_store_that_fails_says_why(
    make: Make, monkeypatch: pytest.MonkeyPatch, error: Exception, answer: str
) -> None:
    worker = make(kind=WithoutUpdate)

    def save(*_: Any) -> Any:
        raise error

    monkeypatch.setattr(worker.bench.app.results, "save", save)
    assert worker.answered("save", b"page 7") == (answer, None)


def test_what_a_retry_could_not_carry_is_not_stored_either(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    worker = make(kind=WithoutUpdate)
    monkeypatch.setattr("aztask.queues.local.broker.MESSAGE_LIMIT", 2_000)
    error, _ = worker.answered("save", b"x" * 1_500)
    assert error.startswith("too large: ")
    run = worker.bench.app.results.start([])
    assert run == []
    worker.bench.clock.now += 10 * LEASE
    (again,) = worker.bench.again()
    assert message_of(again).saved is None


# -- the state of a session --------------------------------------------------------------------


def test_the_state_of_a_session_is_read_and_written(make: Make) -> None:
    worker = make()
    holder = worker.in_session()
    assert worker.answered("state") == ("", b"page 7")
    assert worker.answered("set-state", b"page 8") == ("", None)
    assert holder.states == {"s1": b"page 8"}
    assert message_of(worker.item).saved is None, "it is no checkpoint"
    assert worker.answered("set-state", None) == ("", None)
    assert worker.answered("state") == ("", None)


def test_a_delivery_without_a_session_has_the_empty_one(make: Make) -> None:
    worker = make()
    holder = worker.in_session()
    worker.item.delivery.session = None
    assert worker.answered("set-state", b"x") == ("", None)
    assert holder.states[""] == b"x"


def test_a_queue_without_sessions_says_so(make: Make) -> None:
    worker = make()
    worker.item.receiver = SimpleNamespace()  # type: ignore[assignment]
    error, value = worker.answered("state")
    assert "'default' has no sessions" in error
    assert value is None


@pytest.mark.parametrize(("left", "error"), [(0.001, ""), (0.0, "lost")])
def test_the_state_is_the_holders_alone(make: Make, left: float, error: str) -> None:
    worker = make()
    holder = worker.in_session()
    worker.item.delivery.deadline = worker.bench.clock.now + left
    assert worker.answered("set-state", b"x")[0] == error
    assert holder.states == {"s1": b"x" if not error else b"page 7"}
    worker.item.settled = True  # at most once: there is no lease that could be lost
    assert worker.answered("set-state", b"y") == ("", None)


@pytest.mark.parametrize(
    ("error", "answer"),
    [
        (LeaseLost("gone"), "lost"),
        (MessageTooLarge("3 MB"), "3 MB"),
        (BrokerUnavailable("away"), "away"),
        (ValueError("odd"), "ValueError: odd"),
    ],
)
def test_a_state_that_fails_says_why(make: Make, error: Exception, answer: str) -> None:
    worker = make()
    worker.in_session().error = error
    assert worker.answered("state") == (answer, None)
    assert worker.answered("set-state", b"x") == (answer, None)


# -- across a network --------------------------------------------------------------------------


def test_across_a_network_threads_do_it_and_the_loop_answers(make: Make) -> None:
    worker = make(threads=2)
    assert worker.ask("save", b"page 7") == []
    worker.requests.stop()
    assert message_of(worker.item).saved is None, "only the loop changes items"
    worker.mailbox.run()
    assert worker.process.told == [["answer", worker.item.number, "", None]]
    assert message_of(worker.item).saved == b"page 7"


def test_one_that_fails_harms_no_other_of_its_batch(make: Make) -> None:
    worker = make(threads=1)
    worker.in_session().error = ValueError("odd")
    renewed: Any = Renewed(0.0)
    worker.bench.keeper.update = lambda *_: renewed  # type: ignore[method-assign]
    for kind in ("state", "save"):
        worker.ask(kind, *([b"x"] if kind == "save" else []))
    worker.requests.stop()
    worker.mailbox.run()
    assert [(packet[2], packet[3]) for packet in worker.process.told] == [
        ("ValueError: odd", None),
        ("", None),
    ]


def test_what_a_task_has_spent_adds_up_and_needs_no_answer(make: Make) -> None:
    worker = make()
    assert worker.ask("spent", "tokens", 5) == []
    assert worker.ask("spent", "tokens", 7) == []
    assert worker.ask("spent", "images", 1) == []
    assert worker.item.spent == {"tokens": 12, "images": 1}
