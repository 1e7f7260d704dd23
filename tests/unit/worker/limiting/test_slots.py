"""The gate on a real queue and a real result store: who gets which slot, and who is put off."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, cast

import pytest
from pipelinebench import Bench, Make
from runtimes import Noting, make_runtime

from aztask.errors import AztaskError, BrokerUnavailable, ConfigurationError
from aztask.limits.control import ControlState, Pause, Scope
from aztask.limits.declaration import Rate, change_of
from aztask.limits.holders import usage_of
from aztask.limits.rates import AHEAD, SLACK, WEIGHED_AHEAD, spacing
from aztask.limits.slots import slots_of
from aztask.settlement import DeadLetter, Hold
from aztask.stores.records.base import State
from aztask.stores.records.controls import controls_of
from aztask.worker.limiting.slots import LOCAL_LEAD, RETURN_SECONDS, Parking, Slots
from aztask.worker.limiting.stage import LimitStage
from aztask.worker.pausing import FIRST_DELAY, SPREAD
from aztask.worker.pipeline.work import ALWAYS, Stage, WorkItem, message_of
from aztask.workflows.place import NodePlace

GAP = (1.0 + SLACK) / 10


@pytest.fixture
def limited(make: Make) -> Callable[..., tuple[Bench, Slots]]:
    def made(*limits: str, **options: Any) -> tuple[Bench, Slots]:
        bench = make(task={"limits": list(limits or ("api",))})
        bench.app.limit("api", rate="10/s", **options)
        bench.app.limit("slow", rate="1/s")
        return bench, gate_of(bench)

    return made


class Pauses:
    """The paused keys of limits, as a test sets them: by (limit, key)."""

    def __init__(self, paused: Callable[[str, str], Pause | None] = lambda limit, key: None):
        self.tenant = paused


def gate_of(bench: Bench, pauses: Any = None) -> Slots:
    pipeline = bench.pipeline
    runtime = make_runtime(bench.app, clock=bench.clock, keeper=bench.keeper)
    return Slots(runtime, pipeline.put_offs, pipeline.floods, pauses or Pauses(), Parking())


def times(bench: Bench, items: list[WorkItem]) -> list[float]:
    """When each may start, in seconds from now."""
    return [item.window.opens - bench.clock.now for item in items if item.window]


def test_without_limits_it_is_off(make: Make) -> None:
    assert not gate_of(make()).on


def test_those_within_a_second_stay_in_hand_and_the_others_are_put_off_in_order(
    limited: Any,
) -> None:
    bench, gate = limited()
    items = bench.items(*[f"t{n:02}" for n in range(20)])
    assert all(gate.applies(item) for item in items)
    gate.admit(items)
    held = [item for item in items if item.window]
    assert times(bench, held) == pytest.approx([LOCAL_LEAD + n * GAP for n in range(len(held))])
    assert 8 <= len(held) <= 10
    assert all(item.window.closes - item.window.opens < SLACK for item in held if item.window)
    late = items[len(held) :]
    assert [item.stage for item in late] == [Stage.DECIDED] * len(late)
    bench.pipeline.finish(late)
    assert bench.app.broker.stats("default").scheduled == len(late)
    assert bench.app.results.get("t19").state is State.PENDING, "nothing was started"
    seen = []
    for _ in range(40):  # they come back in time, one after the other, and keep their slots
        bench.clock.now += 0.1
        for item in bench.receive():
            gate.admit([item])
            assert item.window is not None
            assert 0.0 <= item.window.opens - bench.clock.now <= RETURN_SECONDS
            assert message_of(item).put_off_count == 1, "each is put off once"
            seen.append(message_of(item).id)
    assert seen == sorted(seen)
    assert len(seen) == len(late)


def test_a_slot_that_was_missed_is_claimed_anew(limited: Any) -> None:
    bench, gate = limited()
    items = bench.items(*[f"t{n:02}" for n in range(12)])
    gate.admit(items)
    bench.pipeline.finish([item for item in items if item.decided])
    bench.clock.now += 30.0  # they waited for long in the queue
    back = bench.receive()
    assert back
    gate.admit(back)
    assert times(bench, back) == pytest.approx([LOCAL_LEAD + n * GAP for n in range(len(back))])


def test_a_backlog_costs_at_most_a_fifth_of_a_request_for_each_task(limited: Any) -> None:
    bench, gate = limited()
    requests = []
    store = gate._claims._store

    class Counting:
        def __getattr__(self, name: str) -> Any:
            requests.append(name)
            return getattr(store, name)

    gate._claims._store = gate._time._store = Counting()
    bench.send(*[f"t{n:03}" for n in range(120)])
    started = 0
    while started < 120:
        items = bench.receive(12)
        for first in range(0, len(items), 12):
            gate.admit(items[first : first + 12])
        bench.pipeline.finish([item for item in items if item.decided])
        ready = [item for item in items if item.window]
        started += len(ready)
        bench.pipeline.claim(ready)
        bench.succeed(ready)
        bench.pipeline.finish(ready)
        bench.clock.now += 0.2
    asked = [name for name in requests if name != "time"]  # a minute for a remote store
    assert len(asked) <= 0.2 * 120


def test_slots_of_an_earlier_rate_do_not_count(limited: Any) -> None:
    bench, gate = limited()
    items = bench.items(*[f"t{n:02}" for n in range(30)])
    gate.admit(items)
    bench.pipeline.finish([item for item in items if item.decided])
    bench.app.limits.pop("api")
    bench.app.limit("api", rate="100/s")
    newer = gate_of(bench)
    newer.admit(bench.items("new"))
    bench.clock.now += 2.0
    back = bench.receive()
    assert len(back) > 5
    gaps = spacing(bench.app.limits["api"].rate)
    newer.admit(back)
    assert times(bench, back) == pytest.approx([LOCAL_LEAD + n * gaps for n in range(len(back))])


def test_each_key_has_the_limit_for_itself(limited: Any) -> None:
    bench, gate = limited(key=lambda values: values[0] or None)
    for task_id, value in (("a", 1), ("b", 1), ("c", 2), ("d", 0)):
        bench.app.send("shop.count", [[value]], task_id=task_id)
    items = bench.receive()
    gate.admit(items)
    assert times(bench, items[:3]) == pytest.approx([LOCAL_LEAD, LOCAL_LEAD + GAP, LOCAL_LEAD])
    assert items[3].window is ALWAYS, "it does not apply to that call"


def test_a_paused_key_is_put_off_and_takes_no_slot_and_others_go_on(limited: Any) -> None:
    bench, gate = limited(key=lambda values: values[0])
    pause = Pause(Scope.TENANT, "api=2", bench.clock.wall())
    gate._pauses = Pauses(lambda limit, key: pause if (limit, key) == ("api", "2") else None)
    for task_id, value in (("a", 1), ("b", 2), ("c", 2)):
        bench.app.send("shop.count", [[value]], task_id=task_id)
    first, second, third = bench.receive()
    gate.admit([first, second, third])
    assert first.window is not None
    for item in (second, third):
        assert (item.stage, item.window) == (Stage.DECIDED, None)
        assert item.settlement.delay == pytest.approx(FIRST_DELAY, rel=SPREAD)
        assert item.decided is not None
        assert item.decided.put_off == "tenant api=2 is paused"
    assert gate._claims.free_at(bench.app.limits["api"].entry("2")) == 0.0


def test_an_at_most_once_message_of_a_paused_key_stays_in_hand(limited: Any) -> None:
    bench, gate = limited(key=lambda values: "acme")
    gate._pauses = Pauses(lambda limit, key: Pause(Scope.TENANT, "api=acme", 0.0))
    (item,) = bench.claimed("a")
    item.settled = True
    gate.admit([item])
    assert (item.window, item.decided) == (None, None)


def test_a_key_alone_limits_nothing_and_can_be_paused(make: Make) -> None:
    bench = make(task={"limits": ["tenant"]})
    bench.app.limit("tenant", key=lambda values: values[0])
    gate = gate_of(bench)
    bench.app.send("shop.count", [["acme"]], task_id="a")
    (item,) = bench.receive()
    gate.admit([item])
    assert item.window is ALWAYS
    gate._pauses = Pauses(
        lambda limit, key: Pause(Scope.TENANT, f"{limit}={key}", bench.clock.wall())
    )
    bench.app.send("shop.count", [["acme"]], task_id="b")
    (item,) = bench.receive()
    gate.admit([item])
    assert item.stage is Stage.DECIDED


def test_a_key_that_cannot_be_made_is_dead_lettered_alone(limited: Any) -> None:
    bench, gate = limited(key=lambda values: 1 // values[0])
    bench.app.send("shop.count", [[0]], task_id="a")
    bench.app.send("shop.count", [[1]], task_id="b")
    items = bench.receive()
    gate.admit(items)
    assert isinstance(items[0].settlement, DeadLetter)
    assert "ZeroDivisionError" in items[0].settlement.description
    assert items[1].window is not None


def test_with_several_limits_the_strictest_decides(limited: Any) -> None:
    bench, gate = limited("api", "slow")
    items = bench.items("a", "b")
    gate.admit(items)
    assert times(bench, items[:1]) == pytest.approx([LOCAL_LEAD])
    assert items[1].waits_in_queue
    bench.pipeline.finish(items[1:])
    bench.clock.now += 0.5
    (item,) = bench.receive()
    assert len(slots_of(message_of(item).slots)) == 2
    gate.admit([item])
    assert item.window is not None
    assert item.window.opens - bench.clock.now == pytest.approx(1.0 + SLACK + LOCAL_LEAD - 0.5)


def test_a_backlog_of_the_slower_rate_delays_nobody_who_needs_the_faster_one(limited: Any) -> None:
    bench, gate = limited("api", "slow")
    items = bench.items(*map(str, range(9)))
    gate.admit(items)
    assert sum(item.window is not None or item.waits_in_queue for item in items) == len(items)
    free_at = gate._claims.free_at(bench.app.limits["api"].entry(""))
    assert free_at - bench.clock.now < WEIGHED_AHEAD + 2.0
    bench.pipeline.finish([item for item in items if item.waits_in_queue])
    bench.clock.now += 60.0
    back = [slots_of(message_of(item).slots) for item in bench.receive()]
    # The first one stayed in hand, and its lease has ended.
    assert sorted(map(len, back)) == [0] * 8 + [2], "those far ahead claim slots when they are back"


def test_while_the_store_is_away_they_wait_as_they_are(limited: Any) -> None:
    bench, gate = limited()
    items = bench.items("a", "b")

    def fail(*_: object) -> None:
        raise BrokerUnavailable("away")

    gate._claims._store = SimpleNamespace(read=fail, write=fail)
    gate.admit(items)
    assert [(item.stage, item.window, item.tries) for item in items] == [
        (Stage.RECEIVED, None, 1)
    ] * 2
    assert gate_of(bench).on


def test_numbers_that_an_operator_changed_count_from_the_next_delivery_on(limited: Any) -> None:
    bench, gate = limited()
    api = bench.app.limits["api"]
    at = bench.app.results.controls.time().at
    slow = change_of(bench.app.name, api, at, rate="2/s")
    gate.obey(ControlState(limits={(bench.app.name, "api"): slow}))
    items = bench.items("a", "b")
    gate.admit(items)
    assert times(bench, items) == pytest.approx([LOCAL_LEAD, LOCAL_LEAD + (1.0 + SLACK) / 2])
    gate.obey(ControlState(limits={("other", "api"): slow}))
    (demand,) = gate._demands(items[0])
    assert demand.limit == api


def test_what_the_store_refuses_for_one_key_holds_up_no_other(
    limited: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    bench, gate = limited(key=lambda values: values[0])
    for value in range(3):
        bench.app.send("shop.count", [[value]], task_id=str(value))
    items = bench.receive()
    claim = gate._claims.claim

    def refusing(wanted: Any, earliest: float) -> Any:
        if wanted.entry == bench.app.limits["api"].entry("0"):
            raise AztaskError("the row of this key is refused")
        return claim(wanted, earliest)

    monkeypatch.setattr(gate._claims, "claim", refusing)
    gate.admit(items)
    assert {message_of(item).id: (item.window is None, item.tries) for item in items} == {
        "0": (True, 1),
        "1": (False, 0),
        "2": (False, 0),
    }


def test_what_the_store_refuses_skips_no_permit(
    limited: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, gate = limited()
    monkeypatch.setattr(gate.permits, "maintain", lambda: ["entry"])
    gate._time.refresh()

    def fail() -> None:
        raise BrokerUnavailable("away")

    monkeypatch.setattr(gate._claims, "settle", fail)
    assert gate.maintain() == ["entry"]
    monkeypatch.setattr(gate._time, "refresh", fail)
    assert gate.maintain() == ["entry"]


def test_a_claimed_one_that_missed_its_slot_goes_back_without_a_start(limited: Any) -> None:
    bench, gate = limited()
    items = bench.items("a")
    gate.admit(items)
    bench.pipeline.claim(items)
    assert items[0].stage is Stage.READY
    gate.admit(bench.items(*[f"t{n:02}" for n in range(20)]))
    items[0].window = None
    gate.admit(items)
    assert items[0].waits_in_queue
    bench.pipeline.finish(items)
    record = bench.app.results.get("a")
    assert (record.state, record.starts) == (State.PENDING, 0)
    bench.clock.now += 1.5
    (again,) = [item for item in bench.receive() if message_of(item).id == "a"]
    bench.pipeline.claim([again])
    assert again.claimed is not None
    assert again.claimed.starts == 1


def test_an_at_most_once_message_that_is_completed_stays_in_hand(limited: Any) -> None:
    bench, gate = limited()
    (item,) = bench.claimed("a")
    item.settled = True
    gate.admit(bench.items(*[f"t{n:02}" for n in range(30)]))
    gate.admit([item])
    assert item.window is not None
    assert item.window.opens - bench.clock.now > AHEAD


def test_in_a_session_the_slot_is_remembered_here(limited: Any) -> None:
    bench, gate = limited()
    gate.admit(bench.items(*[f"t{n:02}" for n in range(20)]))
    (item,) = bench.items("u")
    item.session = SimpleNamespace(held=lambda: None, over=lambda item: None)
    gate.admit([item])
    assert isinstance(item.settlement, Hold)
    bench.clock.now += item.settlement.delay
    again = bench.deliveries.add("default", bench.receiver, item.delivery, item.session)
    again.opened = item.opened
    gate.admit([again])
    assert again.window is not None
    assert again.window.opens - bench.clock.now == pytest.approx(RETURN_SECONDS)


def test_an_expired_one_is_not_put_off(limited: Any) -> None:
    bench, gate = limited()
    (item,) = bench.items("a")
    item.rewrite(expires=bench.clock.now - 1.0)
    gate.admit([item])
    assert item.window is ALWAYS


def test_a_limit_that_is_not_declared_is_refused_when_the_worker_starts(make: Make) -> None:
    bench = make(task={"limits": ["apj"]})
    bench.app.limit("api", rate="10/s")
    with pytest.raises(ConfigurationError, match=r"there is no limit 'apj'.*'api'"):
        gate_of(bench)


def test_limits_need_a_result_store(make: Make) -> None:
    bench = make(task={"limits": ["api"]}, results=False)
    bench.app.limit("api", rate="10/s")
    with pytest.raises(ConfigurationError, match="AZTASK_RESULTS"):
        gate_of(bench)


def test_without_a_permit_a_delivery_is_parked_with_its_ticket(make: Make) -> None:
    bench = make(task={"limits": ["two"]})
    bench.app.limit("two", concurrency=2)
    gate = gate_of(bench)
    items = bench.items("a", "b", "c")
    gate.admit(items)
    assert [item.window for item in items] == [ALWAYS, ALWAYS, None]
    assert [len(item.permits) for item in items] == [1, 1, 0]
    assert items[0].permits_until < bench.clock.now + 10.0
    parked = items[2].parked
    assert parked is not None
    assert (parked.ticket, parked.reason) == (bench.clock.now, "limit two")
    gate.put_off_parked(items[2], parked)
    bench.pipeline.finish(items[2:])
    bench.clock.now += 1.0
    (again,) = bench.receive()
    gate.admit([again])
    assert again.parked == parked, "it keeps its ticket"
    gate.permits.free(items[0].permits[0])
    gate.admit([again])
    assert again.permits


def test_permits_are_free_again_if_the_store_fails_before_all_are_taken(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    bench = make(task={"limits": ["first", "second"]})
    bench.app.limit("first", concurrency=1)
    bench.app.limit("second", concurrency=1)
    gate = gate_of(bench)
    (item,) = bench.items("a")
    second, take = bench.app.limits["second"].permits_entry(""), gate.permits.take

    def failing(entry: str, *given: Any) -> bool:
        if entry == second:
            raise BrokerUnavailable("away")
        return take(entry, *given)

    monkeypatch.setattr(gate.permits, "take", failing)
    for tries in (1, 2):
        gate.admit([item])
        assert (item.tries, item.permits, item.window) == (tries, (), None)
    monkeypatch.undo()
    gate.admit([item])
    assert len(item.permits) == 2
    for entry in item.permits:
        gate.permits.free(entry)
    bench.clock.now += 1.0
    gate.maintain()
    limits = bench.app.limits.values()
    held = [usage_of(controls_of(bench.app.results), limit).held for limit in limits]
    assert held == [{}, {}], "none of them counts as used"


def test_a_permit_is_taken_before_a_slot(make: Make) -> None:
    bench = make(task={"limits": ["both"]})
    bench.app.limit("both", concurrency=1, rate="10/s")
    gate = gate_of(bench)
    items = bench.items("a", "b")
    gate.admit(items)
    assert items[0].window is not None
    assert items[0].window.timed
    assert items[1].parked is not None


def test_a_worker_reports_what_changes_a_limit_and_no_reset_of_before_its_start(
    limited: Any, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    bench, _ = limited()
    runtime = make_runtime(bench.app, clock=bench.clock, keeper=bench.keeper)
    stage = LimitStage(runtime, bench.pipeline, cast(Any, Pauses()), Noting())
    declared, name = bench.app.limits["api"], bench.app.name

    def state(**numbers: Any) -> ControlState:
        change = change_of(name, declared, bench.clock.now, by="ann", **numbers)
        return ControlState(limits={(name, "api"): change})

    nothing, slow, reset = ControlState(), state(rate="1/s"), state()
    stage.obey(nothing, reset)
    stage.obey(reset, nothing)
    assert caplog.messages == []
    stage.obey(nothing, slow)
    stage.obey(slow, reset)
    assert caplog.messages == [
        "limit api has rate 1/1s, by ann",
        "limit api has the numbers of its declaration again, by ann",
    ]
    stage.stop()


# -- costs -----------------------------------------------------------------------------------

TOKENS = Rate(60, 60.0, burst=60)


@pytest.fixture
def weighed(make: Make) -> tuple[Bench, Slots]:
    """A task that costs the sum of its values."""
    bench = make(task={"limits": ["tokens"]})
    bench.app.limit("tokens", rate="60/m", cost=lambda obj, **_: sum(obj))
    return bench, gate_of(bench)


def sent(bench: Bench, **costs: int) -> list[WorkItem]:
    for task_id, cost in costs.items():
        bench.app.send("shop.count", [[cost]], task_id=task_id)
    return bench.receive()


def free_in(bench: Bench, gate: Slots, weight: int) -> float:
    """Seconds until a start of this weight."""
    gate.settle()
    (known,) = gate._claims.read([bench.app.limits["tokens"].entry("")])
    now = bench.clock.now + LOCAL_LEAD
    return known.state.opens(TOKENS, weight, now) - now


def test_a_start_takes_what_it_costs(weighed: Any) -> None:
    bench, gate = weighed
    items = sent(bench, a=40, b=20, c=0, d=30)
    gate.admit(items)
    assert times(bench, items[:2]) == pytest.approx([LOCAL_LEAD] * 2)
    assert items[2].window is ALWAYS, "it costs nothing"
    decided = items[3].decided
    assert decided is not None
    assert decided.put_off == "limit tokens (cost 30)"
    bench.pipeline.finish(items[3:])
    bench.clock.now += decided.settlement.delay
    (back,) = bench.receive()
    (slot,) = slots_of(message_of(back).slots).values()
    assert slot.weight == 30
    gate.admit([back])
    assert back.window is not None
    assert back.window.opens == pytest.approx(slot.at, abs=0.02)


def test_what_is_far_ahead_waits_without_a_slot_for_credits(weighed: Any) -> None:
    bench, gate = weighed
    first, second, third = items = sent(bench, a=60, b=30, c=5)
    gate.admit(items)
    decided = third.decided
    assert decided is not None
    assert decided.put_off == "limit tokens (cost 5)"
    assert 0.25 <= decided.settlement.delay <= 0.5
    bench.pipeline.claim([first])
    first.sent()
    first.spent["tokens"] = 10
    gate.ended(first)
    bench.pipeline.finish([second, third])
    bench.clock.now += 0.6
    (back,) = bench.receive()
    assert (message_of(back).id, message_of(back).slots) == ("c", None)
    gate.admit([back])
    assert times(bench, [back]) == pytest.approx([LOCAL_LEAD]), "the second one does not delay it"


def test_a_cost_that_cannot_be_made_or_is_too_large_is_dead_lettered_alone(make: Make) -> None:
    bench = make(task={"limits": ["tokens"]})
    bench.app.limit("tokens", rate="60/m", cost=lambda obj, **_: obj[0])
    for task_id, value in (("a", 5), ("b", 7), ("c", 1)):
        bench.app.send("shop.count", [[value]], task_id=task_id)
    bench.app.limits.pop("tokens")  # a worker with another function, and a smaller burst
    bench.app.limit("tokens", rate="6/m", cost=lambda obj, **_: 0 if obj[0] == 0 else 7)
    bench.app.send("shop.count", [[0]], task_id="d")
    gate, items = gate_of(bench), bench.receive()
    gate.admit(items)
    for item in items[:3]:
        assert isinstance(item.settlement, DeadLetter)
        assert item.settlement.reason == "limit-cost"
        assert "the call costs 7" in item.settlement.description
    assert items[3].window is ALWAYS


def changed(bench: Bench, **numbers: Any) -> ControlState:
    """What operators changed: the limit of tokens, now."""
    limit = bench.app.limits["tokens"]
    change = change_of(bench.app.name, limit, bench.clock.now, **numbers)
    return ControlState(limits={(bench.app.name, "tokens"): change})


def test_what_was_sent_under_the_declared_burst_runs_under_a_smaller_one(weighed: Any) -> None:
    bench, gate = weighed
    items = sent(bench, a=60)
    gate.obey(changed(bench, burst=10))
    gate.admit(items)
    assert times(bench, items) == pytest.approx([LOCAL_LEAD]), "it waits for a full burst alone"


def test_what_a_run_used_too_much_is_owed_when_the_rate_changes(weighed: Any) -> None:
    bench, gate = weighed
    items = sent(bench, a=60)
    gate.admit(items)
    bench.pipeline.claim(items)
    items[0].sent()
    items[0].spent["tokens"] = 660
    gate.ended(items[0])
    gate.settle()
    bench.clock.now += 1.0
    gate.obey(changed(bench, rate="120/m"))
    (item,) = sent(bench, b=1)
    gate.admit([item])
    assert item.window is None
    free_at = gate._claims.free_at(bench.app.limits["tokens"].entry(""))
    assert free_at - bench.clock.now == pytest.approx(300.0, rel=0.02), "at twice the rate"


def test_what_a_run_says_it_has_used_is_corrected(weighed: Any) -> None:
    bench, gate = weighed
    items = sent(bench, a=60)
    gate.admit(items)
    assert free_in(bench, gate, 50) == pytest.approx(50 * spacing(TOKENS))
    bench.pipeline.claim(items)
    items[0].sent()
    items[0].spent["tokens"] = 10
    gate.ended(items[0])
    gate.ended(items[0])
    assert free_in(bench, gate, 50) == 0.0
    assert free_in(bench, gate, 51) == pytest.approx(spacing(TOKENS)), "credited once"


def test_a_run_that_says_nothing_used_its_estimate(weighed: Any) -> None:
    bench, gate = weighed
    items = sent(bench, a=60)
    gate.admit(items)
    bench.pipeline.claim(items)
    items[0].sent()
    gate.ended(items[0])
    assert free_in(bench, gate, 50) == pytest.approx(50 * spacing(TOKENS))


def test_a_slot_in_which_nothing_started_is_given_back(weighed: Any) -> None:
    bench, gate = weighed
    missed, unstarted = sent(bench, a=30, b=30)
    gate.admit([missed, unstarted])
    gate.missed(missed)
    gate.ended(unstarted)
    assert free_in(bench, gate, 60) == 0.0


def test_a_slot_that_the_message_carries_is_not_given_back(weighed: Any) -> None:
    """Another delivery of the message may start in it."""
    bench, gate = weighed
    items = sent(bench, a=60, b=30)
    gate.admit(items)
    bench.pipeline.finish(items[1:])
    bench.clock.now += 29.5
    (back,) = bench.receive()
    gate.admit([back])
    assert back.window is not None
    before = free_in(bench, gate, 60)
    gate.ended(back)
    assert free_in(bench, gate, 60) == before > 0.0


def test_the_value_that_a_member_takes_is_none_in_its_cost(make: Make) -> None:
    seen: list[Any] = []
    bench = make(task={"limits": ["tokens"]})
    bench.app.limit("tokens", rate="60/m", cost=lambda obj, **_: seen.append(obj) or 1)
    bench.app.send("shop.count", [[1]])
    (item,) = bench.receive()
    item.rewrite(body=bench.app.codec.encode_arguments((), {})[0])
    seen.clear()
    item.place = NodePlace(2, takes=0)
    gate_of(bench).admit([item])
    assert seen == [None]
    assert item.window is not None


def test_several_limits_with_costs_are_taken_together(make: Make) -> None:
    bench = make(task={"limits": ["tokens", "requests"]})
    bench.app.limit("tokens", rate="60/m", cost=lambda obj, **_: sum(obj))
    bench.app.limit("requests", rate="2/m", burst=2)
    gate = gate_of(bench)
    items = sent(bench, a=1, b=60)
    gate.admit(items)
    assert items[0].window is not None
    decided = items[1].decided
    assert decided is not None
    assert decided.put_off == "limit tokens (cost 60), requests"
    bench.pipeline.finish(items[1:])
    bench.clock.now += 5.0
    (back,) = bench.receive()
    first, second = slots_of(message_of(back).slots).values()
    assert first.at == second.at


def test_two_workers_under_one_name_have_permits_of_their_own(make: Make) -> None:
    bench = make(task={"limits": ["two"]})
    bench.app.limit("two", concurrency=2)
    items = bench.items("a", "b", "c", "d")
    gate_of(bench).admit(items[:2])
    gate_of(bench).admit(items[2:])
    assert [bool(item.permits) for item in items] == [True, True, False, False]
    usage = usage_of(controls_of(bench.app.results), bench.app.limits["two"])
    assert usage.held == {"w": 2}


def test_those_that_will_be_put_off_anyhow_are_taken_before_the_pool_has_room(limited: Any) -> None:
    bench, gate = limited()
    runtime = make_runtime(bench.app, clock=bench.clock, keeper=bench.keeper)
    stage = LimitStage(runtime, bench.pipeline, cast(Any, Pauses()), Noting())
    stage._gate = gate
    first = bench.items(*[f"t{n:02}" for n in range(30)])
    opened = deque(bench.items("u1", "u2", "u3"))
    stage.take_far(opened)
    assert len(opened) == 3, "nothing is known of the rate"
    gate.admit(first)
    has_slot = opened[0]
    has_slot.window = ALWAYS
    stage.take_far(opened)
    assert list(opened) == [has_slot]
    assert stage.held == 2, "the others are in the gate"
    bench.clock.now += 10.0  # the next slot is near
    opened = deque(bench.items("v1"))
    stage.take_far(opened)
    assert len(opened) == 1
