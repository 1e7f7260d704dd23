"""The lease keeper: what it asks of a broker and when, and whom it tells. Time stands still.

Only the clock and the requests are made up. Most tests take one turn of the keeper on their own
thread; those of waiting and waking use its thread.
"""

from __future__ import annotations

import threading
from types import SimpleNamespace

import pytest
from still import Still
from waiting import wait_until

from aztask.errors import AlreadySettled, BrokerUnavailable, LeaseLost
from aztask.message.envelope import Envelope
from aztask.queues.base import Capabilities
from aztask.queues.delivery import Delivery, Lost, Renewed, Unknown
from aztask.queues.lease import keeper as leasekeeper
from aztask.queues.lease.keeper import LeaseKeeper, LeaseReports
from aztask.queues.lease.state import Lease, LeaseState
from aztask.support.clock import Clock

PATIENCE = 10.0
BROKEN = Unknown("no answer")
LATE = Unknown("no answer yet", untouched=True)
TAKEN = Lost("another worker took it")


class Requests:
    """A receiver: notes what was asked for, and answers as told; by default yes."""

    def __init__(self, time: Still) -> None:
        self.time = time
        self.asked: list[tuple[list[int], float]] = []
        self.answers: list = []
        self.meanwhile = lambda: None
        self.takes = 0.0
        self.open = threading.Event()
        self.open.set()

    def renew(self, deliveries, seconds):
        asked_at = self.time.now
        self.asked.append(([each.position for each in deliveries], seconds))
        self.meanwhile()
        assert self.open.wait(PATIENCE)
        self.time.now += self.takes
        return [self._answer(each, asked_at, seconds) for each in deliveries]

    def update(self, delivery, envelope):
        (answer,) = self.renew([delivery], delivery.lease_seconds)
        delivery.envelope = envelope
        return answer

    def _answer(self, delivery, asked_at, seconds):
        answer = self.answers.pop(0) if self.answers else None
        if isinstance(answer, Exception):
            raise answer
        if answer is None:
            delivery.deadline, delivery.lease_seconds = asked_at + seconds, seconds
            answer = Renewed(delivery.deadline)
        return answer


class Reports(LeaseReports):
    """Passes what a keeper reports on to its bench."""

    def __init__(self, bench):
        self.bench = bench

    def lost(self, lease):
        self.bench.lost.append(lease)

    def renewed(self, lease, age):
        self.bench.renewed.append((lease, age))
        self.bench.then()

    def settleable(self):
        self.bench.settleable.release()


class Bench:
    """A keeper, its clock, two receivers, and what the keeper said. then: called at a renewal."""

    def __init__(self, renew_at=0.7, **capabilities):
        self.time = Still(1000.0)
        self.clock = Clock(monotonic=self.time.monotonic, wall=self.time.wall)
        self.requests, self.others = Requests(self.time), Requests(self.time)
        self.lost: list[Lease] = []
        self.renewed: list[tuple[Lease, float]] = []
        self.settleable = threading.Semaphore(0)
        can = Capabilities("made up", **{"remote": False, **capabilities})
        self.keeper = LeaseKeeper(
            SimpleNamespace(capabilities=can),
            clock=self.clock,
            renew_at=renew_at,
            reports=Reports(self),
        )
        self.then = lambda: None
        self._positions = 0

    def lease(self, seconds=10.0, *, hold=True, requests=None):
        """A lease that begins now, held by the keeper."""
        self._positions += 1
        now = self.time.now
        delivery = Delivery(
            "q", Envelope(b""), self._positions, "token", 1, 0.0, now + seconds, seconds
        )
        lease = Lease(delivery, seconds, now)
        if hold:
            self.keeper.hold(requests or self.requests, [lease])
        return lease

    def due(self, seconds=100.0):
        """A lease of so many seconds that is due for renewal already."""
        lease = self.lease(seconds, hold=False)
        lease.granted_at -= seconds - 1.0
        lease.delivery.deadline = self.time.now + 1.0
        self.keeper.hold(self.requests, [lease])
        return lease

    def turn(self, seconds=0.0):
        """Let time pass, and the keeper do what is due then."""
        self.time.now += seconds
        self.keeper.turn()

    @property
    def asked(self):
        return self.requests.asked

    @property
    def told_settleable(self):
        return self.settleable.acquire(blocking=False)


@pytest.fixture
def make():
    made = []

    def bench(*args, **options):
        made.append(Bench(*args, **options))
        return made[-1]

    yield bench
    for each in made:
        each.requests.open.set()
        each.keeper.stop()


@pytest.fixture
def bench(make):
    return make()


# -- renewing --------------------------------------------------------------------------------


def test_a_lease_is_renewed_when_its_share_has_passed_and_not_before(bench):
    lease = bench.lease()
    bench.turn(6.999)
    assert bench.asked == []
    bench.turn(0.001)
    assert bench.asked == [([1], 10.0)]
    assert bench.renewed == [(lease, pytest.approx(0.7))]
    assert not bench.told_settleable, "nobody waits for that"
    assert (lease.deadline, lease.state) == (1017.0, LeaseState.HELD)
    bench.turn(6.999)
    assert len(bench.asked) == 1
    bench.turn(0.001)
    assert len(bench.asked) == 2


def test_another_share_is_taken_from_the_caller(make):
    bench = make(renew_at=0.5)
    bench.lease()
    bench.turn(5.0)
    assert len(bench.asked) == 1


def test_a_slow_answer_counts_from_the_moment_before_it_was_asked_for(bench):
    lease = bench.lease()
    bench.requests.takes = 2.0
    bench.turn(7.0)
    assert bench.renewed == [(lease, pytest.approx(0.7))], "the age when it was asked for"
    assert lease.granted_at == 1007.0
    assert lease.deadline == 1017.0
    bench.turn(5.0)  # 1014: 70 % of the lease that began at 1007
    assert len(bench.asked) == 2


def test_one_request_renews_all_of_a_receiver_that_want_as_long(bench):
    bench.lease()
    bench.lease()
    bench.lease(requests=bench.others)
    longer = bench.lease()
    longer.seconds = 30.0
    bench.turn(7.0)
    assert bench.asked == [([1, 2], 10.0), ([4], 30.0)]
    assert bench.others.asked == [([3], 10.0)]
    assert len(bench.renewed) == 4


def test_renewals_that_differ_by_less_than_a_tenth_of_a_second_share_a_request(bench):
    first, second = bench.lease(), bench.lease()
    first.limit_at, second.limit_at = 1012.51, 1012.54
    bench.turn(7.0)
    assert bench.asked == [([1, 2], 5.5)]


def test_a_renewal_near_the_limit_is_shortened_and_then_no_more_are_made(bench):
    lease = bench.lease()
    bench.keeper.limit(lease, 1012.5)
    bench.turn(7.0)
    assert bench.asked == [([1], 5.5)]
    assert lease.deadline == 1012.5
    bench.turn(4.0)
    bench.turn(1.5)
    assert len(bench.asked) == 1
    assert bench.lost == [lease]


def test_where_the_service_decides_how_long_no_renewal_passes_the_limit(make):
    bench = make(fixed_lease=True)
    bench.keeper.limit(bench.lease(), 1012.5)
    bench.turn(7.0)
    assert bench.asked == []


def test_more_time_is_asked_for_at_the_next_turn(bench):
    lease = bench.lease()
    bench.keeper.extend(lease, 60.0, 1050.0)
    bench.turn()
    assert bench.asked == [([1], 50.0)], "no more than the limit leaves"
    assert lease.deadline == 1050.0


def test_more_time_that_is_asked_for_during_a_renewal_is_asked_for_right_after_it(bench):
    lease = bench.lease()
    bench.requests.meanwhile = lambda: bench.keeper.extend(lease, 60.0, None)
    bench.turn(7.0)
    bench.requests.meanwhile = lambda: None
    bench.turn()
    bench.turn()
    assert bench.asked == [([1], 10.0), ([1], 60.0)]


def test_a_lease_that_is_being_settled_is_not_extended_before_the_answer(bench):
    lease = bench.lease()
    bench.keeper.begin(lease)
    bench.keeper.extend(lease, 60.0, None)
    bench.turn()
    assert bench.asked == []
    bench.keeper.settlement_failed(lease)
    bench.turn(7.0)
    assert bench.asked == [([1], 60.0)]


@pytest.mark.parametrize(
    ("error", "state"), [(BrokerUnavailable("away"), LeaseState.HELD), (ValueError("odd"), None)]
)
def test_an_error_of_one_request_is_retried_and_harms_no_other(bench, error, state, caplog):
    failing, other = bench.lease(), bench.lease(requests=bench.others)
    bench.requests.answers = [error]
    bench.turn(7.0)
    assert [lease for lease, _ in bench.renewed] == [other]
    assert (failing.state, failing.failures) == (LeaseState.HELD, 1)
    assert str(error) in caplog.text
    bench.turn(0.2)
    assert [lease for lease, _ in bench.renewed] == [other, failing]


# -- answers that leave the token in doubt ----------------------------------------------------


@pytest.mark.parametrize(
    ("remote", "update", "answer", "state"),
    [
        (True, True, BROKEN, LeaseState.UNKNOWN),
        (True, True, ValueError("odd"), LeaseState.UNKNOWN),
        (True, True, LATE, LeaseState.HELD),
        (True, True, BrokerUnavailable("not even sent"), LeaseState.HELD),
        (True, False, BROKEN, LeaseState.HELD),
        (False, True, BROKEN, LeaseState.HELD),
    ],
)
def test_a_lost_answer_makes_the_token_stale_where_a_renewal_changes_it(
    make, remote, update, answer, state
):
    """Only on a service that answers with a new token across a network."""
    bench = make(remote=remote, update=update)
    lease = bench.lease()
    bench.requests.answers = [answer]
    bench.turn(7.0)
    assert lease.state is state
    bench.turn(1.0)
    assert len(bench.asked) == (1 if state is LeaseState.UNKNOWN else 2)
    assert bench.lost == []


def test_with_a_stale_token_a_lease_runs_to_its_deadline_and_nothing_is_asked(make):
    bench = make(remote=True, update=True)
    lease = bench.lease()
    bench.requests.answers = [BROKEN]
    bench.turn(7.0)
    for refused in (
        bench.keeper.begin,
        lambda each: bench.keeper.update(each, None, Envelope(b"")),
    ):
        with pytest.raises(LeaseLost, match="no answer"):
            refused(lease)
    assert bench.keeper.begin_settlement([lease]) == [False]
    bench.turn(2.9)
    assert bench.lost == []
    bench.turn(0.1)
    assert bench.lost == [lease]
    assert len(bench.asked) == 1


# -- losing ------------------------------------------------------------------------------------


def test_the_brokers_verdict_is_told_once(bench):
    lease = bench.lease()
    bench.requests.answers = [TAKEN]
    bench.turn(7.0)
    assert bench.lost == [lease]
    assert lease.lost_reason == TAKEN.reason
    assert len(bench.keeper) == 0
    bench.turn(3.0)
    bench.keeper.drop([lease])
    bench.turn(10.0)
    assert (bench.lost, len(bench.asked)) == ([lease], 1)


def test_the_deadline_is_told_once_and_only_of_what_reached_it(bench):
    lease = bench.lease()
    bench.requests.answers = [BROKEN] * 9
    while bench.time.now < 1010.0:
        bench.turn(0.1)
    bench.requests.answers.clear()
    other = bench.lease()
    bench.turn(1.0)
    assert bench.lost == [lease]
    assert other.state is LeaseState.HELD
    bench.turn(6.0)
    bench.turn(9.0)
    assert bench.lost == [lease]


def test_a_refused_settlement_is_a_loss_that_its_caller_knows_already(bench):
    lease = bench.lease()
    bench.keeper.begin(lease)
    bench.keeper.lapse(lease, "refused")
    bench.turn(20.0)
    assert (bench.lost, lease.lost_reason) == ([], "refused")
    assert len(bench.keeper) == 0


def test_a_refused_update_is_a_loss_that_its_caller_knows_already(bench):
    lease = bench.lease()
    bench.requests.answers = [TAKEN]
    assert bench.keeper.update(lease, bench.requests, Envelope(b"")) == TAKEN
    bench.turn(20.0)
    assert (bench.lost, lease.state) == ([], LeaseState.LOST)
    assert len(bench.keeper) == 0


def test_a_loss_that_is_seen_while_a_late_answer_comes_in_is_told_by_who_saw_it(bench, monkeypatch):
    """The answer leaves it held; before the keeper tells, somebody's settlement is refused."""
    lease = bench.lease()
    bench.requests.answers = [LATE]
    settle_all = bench.keeper._condition.notify_all

    def refused_meanwhile():
        if lease.state is LeaseState.HELD:
            bench.keeper.begin(lease)
            bench.keeper.lapse(lease, "refused")
        settle_all()

    monkeypatch.setattr(bench.keeper._condition, "notify_all", refused_meanwhile)
    bench.turn(7.0)
    assert lease.lost_reason == "refused"
    assert bench.lost == []


def test_nothing_is_renewed_or_told_of_what_was_dropped_or_settled(bench):
    dropped, settled = bench.lease(), bench.lease()
    bench.keeper.drop([dropped])
    bench.keeper.begin(settled)
    bench.keeper.settled([settled])
    assert (len(bench.keeper), settled.state) == (0, LeaseState.SETTLED)
    bench.turn(20.0)
    assert (bench.asked, bench.lost) == ([], [])


def test_a_lease_that_is_given_up_while_its_renewal_is_under_way_stays_given_up(bench):
    lease = bench.lease()
    bench.requests.meanwhile = lambda: bench.keeper.drop([lease])
    bench.turn(7.0)
    assert len(bench.keeper) == 0
    bench.turn(20.0)
    assert len(bench.asked) == 1
    assert bench.lost == []


def test_a_receiver_is_let_go_with_its_last_lease(bench):
    """A receiver holds a connection; what the keeper remembers cannot be collected."""
    ends = (
        lambda lease: bench.keeper.drop([lease]),
        lambda lease: (bench.keeper.begin(lease), bench.keeper.settled([lease])),
        lambda lease: (bench.keeper.begin(lease), bench.keeper.lapse(lease, "refused")),
        lambda lease: bench.turn(11.0),  # its deadline
        lambda lease: (bench.requests.answers.append(TAKEN), bench.turn(7.0)),
        lambda lease: (
            bench.requests.answers.append(TAKEN),
            bench.keeper.update(lease, bench.requests, Envelope(b"")),
        ),
    )
    for end in ends:
        end(bench.lease())
        assert bench.keeper._receivers == {}


# -- settling ----------------------------------------------------------------------------------


def test_a_batch_of_settlements_begins_where_nothing_is_under_way(bench):
    held, lost, settled = (bench.lease() for _ in range(3))
    bench.keeper.begin(settled)
    bench.keeper.settled([settled])
    bench.keeper.begin(lost)
    bench.keeper.lapse(lost, "refused")
    assert bench.keeper.begin_settlement([held, lost, settled]) == [True, False, False]
    assert held.state is LeaseState.SETTLING
    assert bench.keeper.begin_settlement([held]) == [False]
    bench.lease(5.0, requests=bench.others)
    bench.turn(7.0 / 2)
    assert bench.others.asked, "others are"
    assert bench.asked == [], "nothing is renewed while it is settled"
    assert not bench.told_settleable, "what has ended does not wait for a renewal"


def test_who_could_not_settle_for_a_renewal_is_told_when_it_is_over(bench):
    waits, other = bench.lease(), bench.lease()
    answers = []
    bench.requests.meanwhile = lambda: answers.extend(bench.keeper.begin_settlement([waits]))
    bench.turn(7.0)
    assert answers == [False]
    assert bench.told_settleable
    assert bench.keeper.begin_settlement([waits, other]) == [True, True]
    bench.requests.meanwhile = lambda: None
    bench.lease()
    bench.turn(7.0)
    assert len(bench.asked) == 2
    assert not bench.told_settleable, "it is told once"


def test_a_settlement_that_failed_leaves_the_lease_held_and_renewed(bench):
    lease = bench.lease()
    bench.keeper.begin(lease)
    bench.turn(8.0)
    assert bench.asked == []
    bench.keeper.settlement_failed(lease)
    assert lease.state is LeaseState.HELD
    bench.turn()
    assert bench.asked == [([1], 10.0)]


def test_a_second_settlement_and_one_of_a_lost_lease_are_refused(bench):
    settled, lost = bench.lease(), bench.lease()
    bench.keeper.begin(settled)
    with pytest.raises(AlreadySettled):
        bench.keeper.begin(settled)
    bench.keeper.begin(lost)
    bench.keeper.lapse(lost, "refused")
    with pytest.raises(LeaseLost, match="refused"):
        bench.keeper.begin(lost)


# -- updates -----------------------------------------------------------------------------------


def test_an_update_renews_and_the_next_renewal_counts_from_it(bench):
    lease = bench.lease()
    bench.time.now += 5.0
    seen = []
    bench.requests.meanwhile = lambda: seen.append(lease.state)
    answer = bench.keeper.update(lease, bench.requests, Envelope(b"new"))
    assert seen == [LeaseState.RENEWING], "nothing settles meanwhile"
    assert answer == Renewed(1015.0)
    assert (lease.granted_at, lease.state) == (1005.0, LeaseState.HELD)
    assert bench.renewed == [(lease, 0.0)]
    bench.turn(6.9)
    assert len(bench.asked) == 1
    bench.turn(0.1)
    assert len(bench.asked) == 2


@pytest.mark.parametrize("remote", [True, False])
def test_an_update_that_fails_leaves_the_lease_as_a_failed_renewal_does(make, remote):
    bench = make(remote=remote, update=True)
    lease = bench.lease()
    bench.requests.answers = [BrokerUnavailable("away")]
    with pytest.raises(BrokerUnavailable):
        bench.keeper.update(lease, bench.requests, Envelope(b""))
    assert lease.state is (LeaseState.UNKNOWN if remote else LeaseState.HELD)
    assert bench.renewed == []


def test_an_update_without_an_answer_is_not_told_as_a_renewal(bench):
    lease = bench.lease()
    bench.requests.answers = [LATE]
    assert bench.keeper.update(lease, bench.requests, Envelope(b"")) == LATE
    assert (bench.renewed, bench.lost, lease.state) == ([], [], LeaseState.HELD)


def test_a_settled_lease_is_not_updated(bench):
    lease = bench.lease()
    bench.keeper.begin(lease)
    with pytest.raises(AlreadySettled):
        bench.keeper.update(lease, bench.requests, Envelope(b""))
    assert bench.asked == []


# -- its own thread ----------------------------------------------------------------------------


@pytest.fixture
def patient(monkeypatch):
    """The keeper looks by itself so seldom that a test which needs it to be woken fails."""
    monkeypatch.setattr(leasekeeper, "LONGEST_SLEEP", 10 * PATIENCE)


def until(condition):
    wait_until(condition, PATIENCE, "what the test waits for")


def idle(bench):
    """Wait until the keeper's thread waits."""
    until(lambda: bench.keeper._condition._waiters)


def test_a_lease_that_is_due_before_all_others_wakes_the_keeper(bench, patient):
    bench.keeper.start()
    idle(bench)
    bench.due()
    until(lambda: bench.asked)
    idle(bench)
    bench.lease(200.0)
    bench.due(50.0)
    until(lambda: len(bench.asked) == 2)


def test_what_is_due_later_than_others_does_not_wake_the_keeper(bench, patient, monkeypatch):
    bench.keeper.start()
    idle(bench)
    woken = []
    notify = bench.keeper._condition.notify
    monkeypatch.setattr(bench.keeper._condition, "notify", lambda: (woken.append(1), notify()))
    bench.keeper.hold(bench.requests, [])
    assert woken == []
    bench.lease(100.0)
    assert woken == [1]
    woken.clear()
    bench.lease(100.0)
    bench.lease(200.0)
    bench.keeper.hold(bench.requests, [])
    assert woken == []


def test_what_is_due_after_the_next_look_does_not_wake_the_keeper(bench, monkeypatch):
    """Else each batch of a worker that holds nothing would: a switch of threads for each."""
    monkeypatch.setattr(leasekeeper, "LONGEST_SLEEP", 30.0)
    bench.keeper.start()
    idle(bench)
    woken = []
    monkeypatch.setattr(bench.keeper._condition, "notify", lambda: woken.append(1))
    bench.lease(100.0)
    assert woken == []
    bench.lease(10.0)
    assert woken == [1]
    monkeypatch.undo()


@pytest.mark.parametrize("how", ["extend", "settlement_failed"])
def test_more_time_and_a_failed_settlement_wake_the_keeper(bench, patient, how):
    bench.keeper.start()
    lease = bench.lease()
    idle(bench)
    if how == "extend":
        bench.keeper.extend(lease, 60.0, None)
    else:
        bench.keeper.begin(lease)
        bench.time.now += 8.0
        bench.keeper.settlement_failed(lease)
    until(lambda: bench.asked)


def test_the_keeper_looks_by_itself_once_in_a_while(bench, monkeypatch):
    """A clock that runs during suspend jumps while the thread sleeps."""
    monkeypatch.setattr(leasekeeper, "LONGEST_SLEEP", 0.01)
    bench.keeper.start()
    bench.lease()
    idle(bench)
    bench.time.now += 7.0
    until(lambda: bench.asked)


def test_the_keeper_sleeps_no_longer_than_until_something_is_due(bench, patient):
    bench.lease(0.01)
    slept = []
    wait = bench.keeper._condition.wait

    def note(seconds):
        slept.append(seconds)
        bench.time.now += seconds
        return wait(0)

    bench.keeper._condition.wait = note
    bench.keeper.turn(wait=True)
    bench.keeper.turn(wait=True)
    assert slept == [pytest.approx(0.007)]
    assert len(bench.asked) == 1


def test_without_leases_the_keeper_sleeps_as_long_as_it_may(bench):
    slept = []
    bench.keeper._condition.wait = slept.append
    bench.keeper.turn(wait=True)
    bench.lease(100.0)
    bench.keeper.turn(wait=True)
    assert slept == [leasekeeper.LONGEST_SLEEP] * 2


def test_once_stopped_it_waits_for_nothing(bench, monkeypatch):
    bench.lease()
    bench.keeper.stop()
    monkeypatch.setattr(bench.keeper._condition, "wait", lambda _: pytest.fail("it waits"))
    bench.keeper.turn(wait=True)


def test_a_turn_without_waiting_returns_at_once(bench, patient):
    bench.lease()
    bench.keeper.turn()
    assert bench.asked == []


def test_stopping_ends_the_thread_at_once_and_renews_no_more(bench, patient):
    bench.lease()
    bench.keeper.start()
    idle(bench)
    thread = bench.keeper._thread
    assert thread.daemon, "a keeper that is never stopped does not keep the process alive"
    bench.keeper.stop()
    assert not thread.is_alive()
    bench.keeper.stop()  # a second time does no harm
    assert bench.asked == []


def test_a_keeper_that_never_started_and_one_that_stops_itself_can_be_stopped(make, patient):
    make().keeper.stop()
    bench = make()
    bench.then = bench.keeper.stop
    bench.keeper.start()
    idle(bench)
    bench.due()
    until(lambda: not bench.keeper._thread.is_alive())


def test_across_a_network_one_receiver_that_hangs_does_not_hold_up_another(make, patient):
    bench = make(remote=True)
    hanging, other = bench.lease(), bench.lease(requests=bench.others)
    bench.requests.open.clear()
    bench.time.now += 7.0
    bench.keeper.start()
    until(lambda: bench.renewed)
    assert [lease for lease, _ in bench.renewed] == [other]
    assert hanging.state is LeaseState.RENEWING
    bench.requests.open.set()
    until(lambda: len(bench.renewed) == 2)
    bench.keeper.stop()
    with pytest.raises(RuntimeError):  # its thread pool is gone too
        bench.keeper._thread_pool.submit(print)


def test_on_the_local_broker_the_keeper_needs_no_other_threads(bench):
    bench.lease()
    bench.lease(requests=bench.others)
    before = threading.active_count()
    names = []
    bench.requests.meanwhile = lambda: names.append(threading.current_thread())
    bench.turn(7.0)
    assert names == [threading.current_thread()]
    assert threading.active_count() == before


@pytest.mark.parametrize("what", ["begin", "update"])
def test_a_settlement_and_an_update_wait_for_the_renewal_under_way(make, patient, what):
    bench = make(remote=True)
    lease = bench.lease()
    bench.requests.open.clear()
    bench.time.now += 7.0
    bench.keeper.start()
    until(lambda: lease.state is LeaseState.RENEWING)
    seen = []

    def work():
        if what == "begin":
            bench.keeper.begin(lease)
        else:
            bench.keeper.update(lease, bench.others, Envelope(b""))
        seen.append(lease.state)

    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    until(lambda: bench.keeper._condition._waiters)
    assert (seen, bench.others.asked) == ([], [])
    bench.requests.open.set()
    thread.join(PATIENCE)
    assert seen == [LeaseState.SETTLING if what == "begin" else LeaseState.HELD]
    assert lease.renewals == (1 if what == "begin" else 2)


def test_an_update_wakes_who_waits_to_settle(make, patient):
    bench = make(remote=True)
    lease = bench.lease()
    bench.requests.open.clear()
    update = threading.Thread(
        target=bench.keeper.update, args=(lease, bench.requests, Envelope(b"")), daemon=True
    )
    update.start()
    until(lambda: lease.state is LeaseState.RENEWING)
    settle = threading.Thread(target=bench.keeper.begin, args=(lease,), daemon=True)
    settle.start()
    until(lambda: bench.keeper._condition._waiters)
    bench.requests.open.set()
    settle.join(PATIENCE)
    assert lease.state is LeaseState.SETTLING


@pytest.mark.parametrize("what", ["begin", "update"])
def test_who_waits_for_a_renewal_waits_no_longer_than_the_lease_lasts(make, what):
    """A renewal that hangs must not hide how the work ended."""
    bench = make(remote=True)
    lease = bench.lease(0.05)
    bench.requests.open.clear()
    bench.time.now += 0.04
    bench.keeper.start()
    until(lambda: lease.state is LeaseState.RENEWING)
    with pytest.raises(LeaseLost, match="no answer"):
        if what == "begin":
            bench.keeper.begin(lease)
        else:
            bench.keeper.update(lease, bench.others, Envelope(b""))
    assert bench.others.asked == []


@pytest.mark.parametrize(("passed", "left"), [(4.0, 6.0), (10.0, 0.0), (12.0, 0.0)])
def test_a_renewal_is_waited_for_until_the_deadline_and_not_at_all_after_it(bench, passed, left):
    lease = bench.lease()
    lease.state = LeaseState.RENEWING
    bench.time.now += passed
    waited = []
    bench.keeper._condition.wait_for = lambda met, timeout: waited.append((met(), timeout))
    with pytest.raises(LeaseLost):
        bench.keeper.begin(lease)
    assert waited == [(False, left)]


def test_reports_are_optional():
    time = Still(1000.0)
    keeper = LeaseKeeper(
        SimpleNamespace(capabilities=Capabilities("made up", remote=False)),
        clock=Clock(monotonic=time.monotonic, wall=time.wall),
    )
    requests = Requests(time)
    delivery = Delivery("q", Envelope(b""), 1, "token", 1, 0.0, 1010.0, 10.0)
    keeper.hold(requests, [Lease(delivery, 10.0, 1000.0)])
    time.now = 1007.0
    keeper.turn()
    requests.answers = [TAKEN]
    time.now = 1014.0
    keeper.turn()
    assert len(requests.asked) == 2
    assert len(keeper) == 0
