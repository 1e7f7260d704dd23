"""Flows in the simulation: they run to their ends, and each assertion about them can fail."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace

import pytest

from aztask import Context
from aztask.settlement import Complete
from aztask.steps.records import StepStore
from aztask.steps.signals import TaskSignals
from aztask.stores.records.base import Outcome, State
from aztask.worker.pipeline.redelivery import UNKNOWN_TASK

from .course import MEETS, Decision
from .flows import Flows
from .programs import Program
from .running import run
from .stepped import Play
from .test_simulation import CALM
from .world import World

PLANS = ("s", "srsf", "e", "w", "a", "z", "l", "c", "t", "sns", "o", "p", "x", "swecztnlropw")
ONE = ("task", 0, 1)
OTHER = ("task", 0, 2)


def flow(plan: str, *signals: tuple[float, str]) -> Decision:
    return Decision(1.0, "flow", "a", (plan, signals))


@pytest.mark.parametrize("kind", ["local", "storage", "bus"])
def test_every_letter_of_a_plan_runs_to_its_end(kind: str) -> None:
    decisions = tuple(flow(plan, (0.0, "go"), (1.0, "go"), (20.0, "stop")) for plan in PLANS)
    report = run(replace(CALM, kind=kind, quiet_at=2000.0, decisions=decisions))
    assert report.text == ""
    assert report.counts["parked runs"] >= 8
    assert report.counts["steps"] >= 10
    assert report.counts["signals"] >= 5
    points = {"step-ran", "step-recorded", "renewed", "parked", "signalled", "woken"}
    assert all(report.points[each] for each in points)


@pytest.mark.parametrize(
    "point", ["step-ran", "step-recorded", "renewed", "timed", "parked", "signalled", "woken"]
)
@pytest.mark.parametrize("kind", ["local", "storage", "bus"])
def test_a_death_at_a_point_of_a_flow_loses_nothing(kind: str, point: str) -> None:
    decisions = tuple(
        flow(plan, (3.0, "go"), (30.0, "stop")) for plan in ("sws", "sasn", "cns", "tsn")
    )
    struck = (Decision(0.5, "die-at", "a", (point, 1)), *decisions)
    report = run(replace(CALM, kind=kind, quiet_at=600.0, decisions=struck))
    assert report.text == ""
    timers_have_numbers = kind == "bus"
    assert report.faults["death at a point"] == int(timers_have_numbers or point != "timed")


@pytest.mark.parametrize("kind", ["local", "storage", "bus"])
def test_a_signal_that_comes_as_the_time_ends_is_taken_once_or_waits(kind: str) -> None:
    decisions = tuple(flow(plan, (MEETS, "go")) for plan in ("w", "aw", "ww", "tw", "sasws") * 3)
    report = run(replace(CALM, kind=kind, workers=2, quiet_at=600.0, decisions=decisions))
    assert report.text == ""
    assert report.counts["signals as a wait ends"] == len(decisions)


@pytest.mark.parametrize("kind", ["local", "storage", "bus"])
def test_a_flow_whose_store_is_away_goes_on_when_it_is_back(
    monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    monkeypatch.setattr(Program, "script", lambda *_: Play(seconds=4.0))
    away = [Decision(at, "outage", "a", ("results", 3.0)) for at in (3.0, 19.0, 47.0)]
    decisions = (*[flow("srwzcs", (8.0, "go"))] * 6, *away)
    report = run(replace(CALM, kind=kind, quiet_at=600.0, decisions=decisions))
    assert report.text == ""
    assert report.faults["outage of the results"] == len(away)
    assert report.counts["flows whose store is away"]


def test_a_run_that_does_not_know_its_steps_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """The store gives it no records: it runs its steps again."""
    monkeypatch.setattr(StepStore, "read", lambda *_, **__: [])
    report = run(replace(CALM, decisions=(flow("sf"),)))
    assert report.name == "step-once"


def test_a_signal_that_wakes_nobody_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """A signal whose row is lost on its way: the wait ends with its time."""
    monkeypatch.setattr(TaskSignals, "signal", lambda *_: None)
    report = run(replace(CALM, decisions=(flow("w", (3.0, "go")),)))
    assert report.name == "signal-is-not-lost"


@pytest.mark.parametrize(("skew", "found"), [(0.0, ["resumes-once"]), (60.0, [])])
def test_a_timer_is_as_early_as_the_clock_is_ahead_of_who_sent_it(
    skew: float, found: list[str]
) -> None:
    """A settlement that is repeated sends the timer again, by the clock of another worker."""
    world = World(replace(CALM, kind="storage", skew=skew))
    park_again(world.flows)
    assert [each.name for each in world.book.violations] == found


def test_a_run_that_is_put_off_as_it_parks_has_not_parked() -> None:
    """The store is away as it ends: it parks in its next hop, for the first time."""
    world = World(CALM)
    for hop in (1, 2):
        context = Context.for_testing(task_id="task")
        context.message = replace(context.message, hop=hop)
        world.flows.parked(context, ONE, 100.0)
    world.flows.rests(context.message.key)
    assert not world.book.violations


def accept(flows: Flows) -> None:
    value = flows.sent("task", "go")
    flows.accepted(value, "task", "go")
    flows.took(ONE, value)
    flows.took(OTHER, value)


def park_again(flows: Flows) -> None:
    for hop in (1, 2):
        context = Context.for_testing(task_id="task")
        context.message = replace(context.message, hop=hop)
        flows.parked(context, ONE, 100.0)
        flows.rests(context.message.key)


def step_again(flows: Flows) -> None:
    flows.called(Context.for_testing(), ONE)
    flows.passed(ONE, 0)
    flows.called(Context.for_testing(), ONE)


def same_key(flows: Flows) -> None:
    context = Context.for_testing()
    context.step("a", lambda: flows.called(context, ONE))
    again = Context.for_testing()
    again.step("a", lambda: flows.called(again, OTHER))


def other_key(flows: Flows) -> None:
    context = Context.for_testing()
    for _ in range(2):
        context.step("a", lambda: flows.called(context, ONE))


def other_value(flows: Flows) -> None:
    flows.passed(ONE, "a")
    flows.passed(ONE, "b")


def go_back(flows: Flows) -> None:
    context = Context.for_testing(task_id="task")
    for epoch in (1, 0):
        flows.begun(context, epoch)


def start_twice(flows: Flows) -> None:
    flows.child("first", ("task", "0", "1"))
    flows.child("second", ("task", "0", "1"))


def fail(flows: Flows) -> None:
    flows.ended(("task", 0, 0), Outcome(State.FAILED, Complete(), error_type="ValueError"))


def give_up_at_once(flows: Flows) -> None:
    flows.met("task", UNKNOWN_TASK)
    flows.ended(("task", 0, 0), Outcome(State.FAILED, Complete(), error_type=UNKNOWN_TASK))


def rest_in_a_slot(flows: Flows) -> None:
    context = Context.for_testing(task_id="task")
    slot = SimpleNamespace(message=context.message)
    worker = SimpleNamespace(name="w", frozen_until=0.0, parked=None, running=lambda: [slot])
    flows.parked(context, ONE, 100.0)
    flows.rests(context.message.key)
    flows.settled(context.message.key)
    flows.check_resting([worker])  # type: ignore[list-item]


@pytest.mark.parametrize(
    ("name", "broken"),
    [
        ("signal-once", accept),
        ("resumes-once", park_again),
        ("step-once", step_again),
        ("step-key", same_key),
        ("step-key", other_key),
        ("step-agrees", other_value),
        ("continues-once", go_back),
        ("started-once", start_twice),
        ("parked-holds-nothing", rest_in_a_slot),
        ("flow-ends-well", fail),
        ("waits-for-the-grace", give_up_at_once),
    ],
)
def test_the_book_complains(name: str, broken: Callable[[Flows], None]) -> None:
    world = World(CALM)
    broken(world.flows)
    assert [each.name for each in world.book.violations] == [name]
