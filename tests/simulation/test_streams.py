"""Streams in the simulation: they are read whole and in order, and each assertion can fail."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest

from aztask.steps import emitting
from aztask.steps.emitting import Emission
from aztask.steps.parts import PartStore
from aztask.steps.stream import RESET, StreamPart

from .course import Decision
from .running import run
from .streams import Started, Streams
from .test_flows import flow
from .test_simulation import CALM
from .world import World

KINDS = ("local", "storage", "bus")
STORM = Decision(0.5, "weather", "a", (3, 0.3, 60.0))


def stream(plan: str = "o", count: int = 5, at: float = 1.0) -> Decision:
    return Decision(at, "stream", "a", (plan, count, 2))


@pytest.mark.parametrize("kind", KINDS)
def test_streams_are_read_whole_while_their_tasks_run(kind: str) -> None:
    decisions = (stream(), stream("fo"), stream(count=0), flow("mzm"), flow("mnmszmf"))
    report = run(replace(CALM, kind=kind, quiet_at=300.0, decisions=decisions))
    assert report.text == ""
    assert report.counts["parts read"] > 20
    assert report.counts["resets of streams"], "after a retry"
    assert report.points["append>"] >= 5


@pytest.mark.parametrize("point", ["append<", "append>", "record<", "settle<", "parked"])
@pytest.mark.parametrize("kind", KINDS)
def test_a_death_or_a_freeze_at_an_append_leaves_no_gap(kind: str, point: str) -> None:
    plans = (stream(), stream("fo", 12), flow("mzm"), flow("szmsm"))
    struck = [
        Decision(0.5, "die-at", "a", (point, 1)),
        Decision(0.5, "freeze-at", "a", (point, 2, 100.0)),
        Decision(0.5, "freeze-at", "a", (point, 2, 40.0)),
    ]
    decisions = (*struck, *plans)
    report = run(replace(CALM, kind=kind, workers=2, quiet_at=600.0, decisions=decisions))
    assert report.text == ""
    assert report.faults["death at a point"] == 1


@pytest.mark.parametrize("kind", ["storage", "bus"])
def test_an_append_whose_answer_is_lost_doubles_nothing(kind: str) -> None:
    decisions = (STORM, *[stream("o", 12)] * 6, *[flow("mzm")] * 3)
    report = run(replace(CALM, kind=kind, quiet_at=600.0, decisions=decisions))
    assert report.text == ""
    assert report.faults["answer_lost"]


def test_a_start_that_writes_into_the_take_of_another_one_is_found(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """All starts of a run have one take."""
    monkeypatch.setattr(emitting, "take_of", lambda message, _: f"{message.hop:08d}.{1:08d}.x")
    struck = Decision(0.5, "die-at", "a", ("append>", 3))
    report = run(replace(CALM, decisions=(struck, stream("o", 12))))
    assert report.name == "superseded-is-not-read"


def test_parts_that_are_not_written_at_the_end_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Emission, "flush", lambda _: None)
    report = run(replace(CALM, decisions=(stream("o", 12), stream("o", 1))))
    assert report.name == "last-take-is-whole"


def test_parts_that_are_written_twice_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """As if each append were repeated after a lost answer, and made other rows."""
    append = PartStore.append

    def twice(self, task_id, take, first, parts, *, new):  # type: ignore[no-untyped-def]
        append(self, task_id, take, 2 * first - 1, parts * 2, new=new)

    monkeypatch.setattr(PartStore, "append", twice)
    report = run(replace(CALM, decisions=(stream("o", 5),)))
    assert report.name == "parts-in-order"


def part(number: int, start: int = 0, emitted: int | None = None) -> StreamPart:
    return StreamPart([start, emitted or number, 0], number, f"t.{number}")


def skip(streams: Streams) -> None:
    streams.check("task", 0, [part(1), part(3)], 0.0)


def double(streams: Streams) -> None:
    streams.check("task", 2, [part(3), RESET, part(1), part(1)], 0.0)


def swap(streams: Streams) -> None:
    streams.check("task", 0, [part(1, emitted=2)], 0.0)


def read_what_is_superseded(streams: Streams) -> None:
    streams.started(Started(("task", 0, 1), began_at=5.0))
    streams.check("task", 0, [part(1)], 4.0)
    assert not streams._world.book.violations, "the other one had not begun"
    streams.check("task", 0, [part(1)], 6.0)


@pytest.mark.parametrize(
    ("name", "broken"),
    [
        ("parts-in-order", skip),
        ("parts-in-order", double),
        ("parts-in-order", swap),
        ("superseded-is-not-read", read_what_is_superseded),
    ],
)
def test_the_book_complains(name: str, broken: Callable[[Streams], None]) -> None:
    world = World(CALM)
    world.streams.started(Started(("task", 0, 0)))
    broken(world.streams)
    assert [each.name for each in world.book.violations] == [name]


def test_a_run_that_goes_on_keeps_the_parts_before_its_wait() -> None:
    world = World(CALM)
    world.streams.started(Started(("task", 0, 0), began_at=1.0, parked=True))
    world.streams.started(Started(("task", 0, 1), began_at=2.0))
    world.streams.check("task", 0, [part(1), part(2, 1)], 3.0)
    assert not world.book.violations
