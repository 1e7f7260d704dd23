"""Time limits and lost leases of what runs, with a made-up pool and a clock that stands still.

The lease keeper and the journal are the real ones; of the keeper only the requests are made up.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from types import SimpleNamespace

import pytest
from runtimes import Noting, make_runtime
from still import Still

from aztask import App
from aztask.config import Settings
from aztask.errors import LeaseLost
from aztask.message.envelope import Envelope
from aztask.message.message import TaskMessage
from aztask.queues.base import Capabilities
from aztask.queues.delivery import Delivery, Lost, Renewed, Unknown
from aztask.queues.lease.keeper import LeaseKeeper, LeaseReports
from aztask.queues.lease.state import Lease, LeaseState
from aztask.support.clock import Clock
from aztask.worker.pipeline.work import Step, WorkItem
from aztask.worker.pool.leaseguard import STOP_GRACE
from aztask.worker.pool.timelimits import TimeLimits

START = 1000.0


@dataclass
class Process:
    """A pool process as the limits see it. told: control packets. killed: (reason, delivery)."""

    items: dict[int, WorkItem] = field(default_factory=dict)
    since: dict[int, float] = field(default_factory=dict)
    told: list = field(default_factory=list)
    killed: list = field(default_factory=list)

    def running(self):
        return [(self.items[number], at) for number, at in self.since.items()]

    def tell(self, packet):
        self.told.append(packet)

    def kill(self, reason, culprit=None):
        self.killed.append((reason, culprit))


class Requests:
    """A receiver whose renewals are answered as told; by default yes."""

    def __init__(self):
        self.answer = None
        self.asked = []

    def renew(self, deliveries, seconds):
        self.asked.append(seconds)
        answers = []
        for each in deliveries:
            if self.answer is None:
                each.deadline, each.lease_seconds = self.time.now + seconds, seconds
            answers.append(self.answer or Renewed(each.deadline))
        return answers


class Reports(LeaseReports):
    """The bench is told of a lost lease, and does as the core does."""

    def __init__(self, bench):
        self.bench = bench

    def lost(self, lease):
        self.bench.lost.append(lease)
        self.bench.limits.stop(self.bench.item, "lease", lease.lost_reason)


class Bench(Noting):
    """One task that runs on the first of two processes, since START."""

    def __init__(self, *, held=100.0, message=None, options=None, fixed_lease=False, **task):
        super().__init__()
        self.time = Still(START)
        clock = Clock(monotonic=self.time.monotonic, wall=self.time.wall)
        self.process, self.idle = Process(), Process()
        self.requests = Requests()
        self.requests.time = self.time
        self.keeper = LeaseKeeper(
            SimpleNamespace(
                capabilities=Capabilities("made up", remote=False, fixed_lease=fixed_lease)
            ),
            clock=clock,
            reports=Reports(self),
        )
        self.events = []
        self.limits = TimeLimits(
            make_runtime(
                SimpleNamespace(settings=Settings(lease_seconds=100.0, max_lease_seconds=500.0)),
                clock=clock,
                keeper=self.keeper,
                emit=self.events.append,
                **(options or {}),
            ),
            SimpleNamespace(processes=[self.idle, self.process]),
            self,
        )
        self.app = App("shop", broker="local://:memory:")
        self.item = self.add(held, {} if message is None else message, task)

    def add(self, lease, message, task):
        """Another task that runs beside it, on the same process."""
        number = len(self.process.items) + 1
        delivery = Delivery("q", Envelope(b""), number, "t", 1, START, START + lease, lease)
        item = WorkItem(
            number,
            delivery,
            self.requests,
            Lease(delivery, lease, START),
            "q",
            START,
            f"w/{number}",
        )
        item.open(
            TaskMessage(f"task-{number}", "shop.work", "q", b"", **message),
            self.app.task(name=f"work{number}", **task)(print),
        )
        item.change(Step.CLAIM)
        item.sent()
        self.process.items[number] = item
        self.process.since[number] = START
        self.keeper.hold(self.requests, [item.lease])
        return item

    def at(self, now, *, renewing=True):
        """The supervisor's turn and the keeper's, at START + now."""
        self.time.now = START + now
        if renewing:
            self.keeper.turn()
        self.limits.enforce(self.time.now)

    @property
    def interrupts(self):
        return [(packet[1], packet[2]) for packet in self.process.told if packet[0] == "interrupt"]


# -- time limits ------------------------------------------------------------------------------


@pytest.mark.parametrize("where", ["task", "message"])
def test_the_soft_limit_is_signalled_once_at_its_very_instant(where):
    limit = {"soft_time_limit": 5.0}
    bench = Bench(message=limit) if where == "message" else Bench(**limit)
    bench.at(4.999)
    assert bench.process.told == []
    bench.at(5.0)
    assert bench.process.told == [["interrupt", 1, "limit", "soft time limit of 5 s"]]
    for now in (5.1, 6.0, 50.0, 90.0):
        bench.at(now)
    assert len(bench.process.told) == 1
    assert bench.process.killed == []
    assert bench.idle.told == []


@pytest.mark.parametrize("where", ["task", "message"])
def test_the_hard_limit_kills_the_process_at_its_very_instant(where):
    limit = {"time_limit": 5.0}
    bench = Bench(message=limit) if where == "message" else Bench(**limit)
    bench.at(4.999)
    assert bench.process.killed == []
    bench.at(5.0)
    assert bench.process.killed == [("the time limit of 5 s was exceeded", 1)]
    assert bench.idle.killed == []


def test_a_messages_own_limits_come_before_the_tasks():
    longer = {"time_limit": 50.0, "soft_time_limit": 40.0}
    bench = Bench(message=longer, time_limit=5.0, soft_time_limit=4.0)
    bench.at(39.9)
    assert (bench.process.told, bench.process.killed) == ([], [])
    bench.at(40.0)
    bench.at(50.0)
    assert bench.interrupts == [(1, "limit")]
    assert len(bench.process.killed) == 1


def test_without_limits_a_task_may_run():
    bench = Bench()
    for now in range(0, 499, 10):
        bench.at(now)
    assert (bench.process.told, bench.process.killed) == ([], [])
    assert bench.item.lease.state is LeaseState.HELD


def test_limits_count_from_the_start_that_the_process_noted():
    bench = Bench(time_limit=5.0)
    bench.process.since[1] = START + 20.0
    bench.at(24.9)
    assert bench.process.killed == []
    bench.at(25.0)
    assert len(bench.process.killed) == 1


def test_a_task_that_is_not_known_has_the_limits_of_its_message():
    bench = Bench(message={"time_limit": 9.0, "soft_time_limit": 5.0})
    bench.item.open(bench.item.opened.message, None)
    bench.at(4.9)
    assert bench.process.told == []
    bench.at(5.0)
    bench.at(9.0)
    assert bench.interrupts == [(1, "limit")]
    assert len(bench.process.killed) == 1


def test_each_task_of_a_process_has_its_own_limits():
    bench = Bench(time_limit=50.0)
    bench.add(100.0, {"soft_time_limit": 5.0}, {})
    bench.at(5.0)
    assert bench.interrupts == [(2, "limit")]
    bench.at(50.0)
    assert bench.process.killed == [("the time limit of 50 s was exceeded", 1)]


# -- lost leases ------------------------------------------------------------------------------


def test_a_task_that_ignores_its_lost_lease_is_killed_after_the_grace():
    """However often it is noticed that it must stop: the time to kill stays where it was."""
    bench = Bench(held=10.0)
    bench.requests.answer = Unknown("no answer")
    bench.at(8.999)
    assert bench.process.told == []
    bench.at(9.0)
    assert bench.interrupts == [(1, "lease")]
    assert bench.item.stop.kill_at == START + 9.0 + STOP_GRACE
    for now in (9.3, 9.6, 9.999):
        bench.at(now)
        bench.limits.stop(bench.item, "cancel", "noticed once more")
    assert bench.process.killed == []
    bench.at(10.0)
    assert bench.process.killed == [
        ("task shop.work task-1 did not stop: its lease was not renewed in time", 1)
    ]
    assert bench.interrupts == [(1, "lease")]
    assert bench.lost == [bench.item.lease]


def test_the_grace_is_a_second():
    assert STOP_GRACE == 1.0


@pytest.mark.parametrize(
    ("answer", "at"),
    [
        (Lost("another worker took it"), 7.0),  # the broker's verdict
        (Unknown("no answer"), 9.0),  # the clock, before the deadline
    ],
)
def test_whatever_notices_the_loss_the_task_is_told_once_and_killed_once_a_grace_later(answer, at):
    bench = Bench(held=10.0)
    bench.requests.answer = answer
    told_at, killed_at = [], []
    for tick in range(130):
        now = tick / 10
        bench.at(now)
        if bench.interrupts and not told_at:
            told_at.append(now)
        if bench.process.killed and not killed_at:
            killed_at.append(now)
            break
    assert bench.interrupts == [(1, "lease")]
    assert told_at == [at]
    assert killed_at == [at + STOP_GRACE]
    assert bench.lost == [bench.item.lease]


@pytest.mark.parametrize("seen_first_by", ["keeper", "limits"])
def test_a_keeper_that_was_asleep_past_the_deadline_tells_once(seen_first_by):
    """The machine was suspended: the supervisor and the keeper notice it at the same time."""
    bench = Bench(held=10.0)
    bench.at(1.0)
    bench.at(60.0, renewing=seen_first_by == "keeper")
    bench.at(60.5)
    assert bench.interrupts == [(1, "lease")]
    assert bench.lost == [bench.item.lease]
    bench.at(61.0)
    assert len(bench.process.killed) == 1


def test_a_refused_settlement_is_not_told_as_a_loss():
    """Who settles knows it already; the task has ended."""
    bench = Bench(held=10.0)
    bench.keeper.begin(bench.item.lease)
    bench.keeper.lapse(bench.item.lease, "refused")
    bench.item.settled = True
    bench.at(20.0)
    assert (bench.lost, bench.process.told) == ([], [])
    with pytest.raises(LeaseLost):
        bench.keeper.begin(bench.item.lease)


def test_a_settled_delivery_has_no_lease_to_watch():
    bench = Bench(held=10.0)
    bench.item.settled = True
    bench.keeper.drop([bench.item.lease])
    bench.at(20.0)
    bench.at(2000.0)
    assert (bench.process.told, bench.process.killed) == ([], [])


def test_after_the_soft_limit_a_lost_lease_still_ends_it():
    bench = Bench(held=10.0, soft_time_limit=2.0)
    bench.requests.answer = Unknown("no answer")
    bench.at(2.0)
    bench.at(9.0)
    assert bench.interrupts == [(1, "limit"), (1, "lease")]
    bench.at(10.0)
    assert len(bench.process.killed) == 1


def test_before_the_grace_has_passed_the_hard_limit_counts_too():
    bench = Bench(held=10.0, time_limit=9.5)
    bench.requests.answer = Unknown("no answer")
    bench.at(9.0)
    bench.at(9.5)
    assert bench.process.killed == [("the time limit of 9.5 s was exceeded", 1)]


def test_only_the_process_that_runs_the_task_is_told():
    bench = Bench()
    bench.limits.stop(bench.item, "lease", "why")
    assert bench.process.told == [["interrupt", 1, "lease", "why"]]
    assert bench.idle.told == []
    assert bench.item.stop.reason == "why"


def test_a_cancelled_task_is_told_once_and_killed_after_the_grace():
    bench = Bench()
    bench.limits.cancel(bench.item)
    bench.limits.cancel(bench.item)
    assert bench.item.run.cancelled is True
    assert bench.process.told == [["interrupt", 1, "cancel", "it was cancelled"]]
    bench.at(0.999)
    assert bench.process.killed == []
    bench.at(1.0)
    assert bench.process.killed == [("task shop.work task-1 did not stop: it was cancelled", 1)]


# -- the longest lease ------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "task", "longest"),
    [
        ({}, {}, 500.0),
        ({}, {"max_lease": 300.0}, 300.0),
        ({"max_lease": 200.0}, {"max_lease": 300.0}, 200.0),
        ({"max_lease": 200.0}, {}, 200.0),
    ],
)
def test_the_longest_lease_counts_from_the_start_and_then_the_task_must_stop(
    options, task, longest
):
    bench = Bench(options=options, **task)
    bench.process.since[1] = START + 3.0
    for now in range(3, int(longest)):
        bench.at(now)
    bench.at(longest + 0.999)
    assert bench.process.told == []
    assert bench.item.lease.limit_at == START + 3.0 + longest
    assert bench.limits.limit_at(bench.item) == START + 3.0 + longest
    # 2 s before: 1 s for the task to stop, and 1 s to record that it failed
    bench.at(longest + 1.0)
    assert bench.interrupts == [(1, "max-lease")]
    bench.at(longest + 1.999)
    assert bench.process.killed == []
    bench.at(longest + 2.0)
    assert len(bench.process.killed) == 1
    assert bench.item.lease.alive(bench.time.now)
    assert bench.lost == []


@pytest.mark.parametrize("renewed", [True, False])
def test_where_the_service_sets_the_lease_the_last_one_ends_the_run(renewed):
    """A renewal that would pass max_lease is not made; one that failed is another thing."""
    bench = Bench(held=60.0, fixed_lease=True, max_lease=100.0)
    bench.at(0.0)
    if not renewed:
        bench.requests.answer = Unknown("no answer")
        bench.at(39.0)
        bench.keeper.extend(bench.item.lease, 60.0, bench.item.lease.limit_at)
        bench.at(39.5)
        assert bench.item.lease.failures
    bench.at(57.999)
    assert bench.process.told == []
    bench.at(58.0)
    assert bench.interrupts == [(1, "max-lease" if renewed else "lease")]


def test_a_short_max_lease_leaves_a_fifth_of_it_to_stop_and_to_record():
    bench = Bench(held=4.0, max_lease=5.0)
    for now in (0.0, 2.9, 3.99):
        bench.at(now)
    assert bench.process.told == []
    bench.at(4.0)
    assert bench.interrupts == [(1, "max-lease")]
    assert bench.item.stop.failed
    assert bench.item.stop.kill_at == START + 4.5


def test_a_task_stops_at_the_longest_lease_although_its_lease_lasts_longer():
    """Where the service decides how long a lease lasts, it may end after the limit."""
    bench = Bench(held=1000.0)
    bench.at(0.0)
    bench.at(497.999)
    assert bench.process.told == []
    bench.at(498.0)
    text = "it would hold its message for longer than max_lease, 500 s"
    assert bench.process.told == [["interrupt", 1, "max-lease", text]]
    bench.at(499.0)
    assert bench.process.killed == [(f"task shop.work task-1 did not stop: {text}", 1)]


def test_before_the_start_is_noted_the_limit_counts_from_now():
    bench = Bench()
    bench.item.open(bench.item.opened.message, None)
    bench.time.now = START + 7.0
    assert bench.limits.limit_at(bench.item) == START + 507.0


# -- the start ---------------------------------------------------------------------------------


def test_a_start_is_told_once():
    bench = Bench()
    bench.at(2.0)
    bench.at(3.0)
    assert [event.event for event in bench.events] == ["started"]
    assert bench.events[0].ts == START
    assert bench.item.run.started_at == START


@pytest.mark.parametrize(
    ("options", "wanted", "asked"),
    [
        ({}, 250.0, [250.0]),  # more than it was received under: asked for at once
        ({}, 100.0, []),
        ({}, 50.0, []),  # a shorter one is not worth a request
        ({}, None, []),
        ({"lease": 60.0}, 250.0, []),  # --lease is what the operator said
    ],
)
def test_a_tasks_own_lease_holds_from_its_start(options, wanted, asked):
    bench = Bench(options=options, **({} if wanted is None else {"lease": wanted}))
    bench.at(1.0)
    bench.keeper.turn()
    assert bench.requests.asked == asked
    assert bench.item.lease.limit_at == START + 500.0


def test_a_delivery_without_a_task_is_limited_as_the_settings_say():
    bench = Bench()
    bench.item.open(bench.item.opened.message, None)
    bench.at(1.0)
    assert bench.item.lease.limit_at == START + 500.0


def test_at_most_once_there_is_no_lease_to_extend():
    bench = Bench(held=10.0)
    bench.item.open(bench.item.opened.message, bench.app.task(name="eager", lease=250.0)(print))
    bench.item.settled = True
    bench.at(1.0)
    bench.keeper.turn()
    assert bench.requests.asked == []
    assert bench.item.lease.limit_at is None
    assert [event.event for event in bench.events] == ["started"]


def test_what_was_taken_back_has_no_limits_and_the_tasks_after_it_do():
    """The board of its process may show it for a moment longer."""
    bench = Bench(held=10.0, soft_time_limit=1.0, time_limit=2.0)
    bench.add(100.0, {"time_limit": 5.0}, {})
    bench.item.run = None
    bench.limits.stop(bench.item, "lease", "why")
    bench.limits.cancel(bench.item)
    assert bench.process.told == []
    assert bench.limits.limit_at(bench.item) == START + 500.0
    bench.at(5.0, renewing=False)
    assert bench.process.killed == [("the time limit of 5 s was exceeded", 2)]
