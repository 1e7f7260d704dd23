"""The simulation itself: it repeats, it finds what it should, and it shortens what it finds."""

from __future__ import annotations

import re
import subprocess
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from itertools import count
from threading import Event

import pytest

from aztask.limits.declaration import Limit
from aztask.message.envelope import Envelope
from aztask.support.clock import SYSTEM_CLOCK
from aztask.support.failpoint import STEPS
from aztask.worker.upkeep.heartbeat import LostRuns

from . import operations, world
from .actors import Actor, keys_of
from .book import Book, key_of
from .course import Course, Decision, draw
from .coverage import ELSEWHERE, POOL, never_reached
from .known import KNOWN, PATCHES, ROOT
from .programs import Program
from .running import run, run_seed
from .services import StorageQueues
from .shrinking import shrink
from .stepped import Play, Time
from .world import World

SEEDS = (13, 41, 39)

CALM = Course(
    seed=5, joint=False, apps=("a",), workers=1, slots=2, every=0.0, quiet_at=60.0, decisions=()
)


@pytest.mark.parametrize("seed", SEEDS)
def test_a_course_ends_well_and_is_the_same_again(seed: int) -> None:
    first, again = run_seed(seed), run_seed(seed)
    assert first.text == ""
    assert (first.counts, first.steps, first.virtual) == (again.counts, again.steps, again.virtual)
    assert first.counts["task runs"] > 50


def test_the_key_of_a_message() -> None:
    assert key_of("a:b:1:2") == (("a:b", 1, 2), False)
    assert key_of("a:1:2:put-3") == (("a", 1, 2), False)
    assert key_of("a:1:2:pointer-0:put-1") == (("a", 1, 2), True)
    assert key_of("garbage-7")[0] == ("", 0, 0)


def test_a_failing_course_is_shortened_to_what_matters() -> None:
    def fails(each: Course) -> bool:
        return sum(one.kind == "workflow" for one in each.decisions) >= 2

    course = next(each for each in map(draw, count(3)) if fails(each))
    short = shrink(course, fails, 10.0)
    assert [each.kind for each in short.decisions] == ["workflow", "workflow"]
    assert not short.shuffled


def test_every_failpoint_is_simulated_or_has_a_test_of_its_own() -> None:
    assert ELSEWHERE.keys() <= set(STEPS)
    for step, file in ELSEWHERE.items():
        text = (ROOT / "tests" / file).read_text()
        named = POOL if step.startswith(POOL) else step
        assert re.search(rf"[\"']{named}[\"':]", text), f"{file} has no kill at {step}"


def test_a_failpoint_that_is_never_reached_is_named() -> None:
    reached = dict.fromkeys(set(STEPS) - ELSEWHERE.keys(), 1)
    assert never_reached(reached) == []
    assert never_reached({**reached, "sent": 0}) == ["sent"]


@pytest.mark.parametrize("kind", ["local", "storage", "bus"])
def test_a_death_between_the_values_of_a_full_row_and_its_bit_loses_nothing(kind: str) -> None:
    """Only a chord with more members than courses draw has full rows."""
    shape = ("chord", tuple(("t", f"n{each}", "o") for each in range(300)), ("t", "body", "o"))
    decisions = (
        Decision(0.5, "die-at", "a", ("row-filled", 1)),
        Decision(1.0, "workflow", "a", (shape, "f1")),
    )
    report = run(replace(CALM, kind=kind, slots=64, quiet_at=300.0, decisions=decisions))
    assert report.text == ""
    assert report.faults["death at a point"] == 1


def test_each_patch_is_a_known_fault() -> None:
    assert {each.stem for each in PATCHES.glob("*.patch")} == set(KNOWN)


@pytest.mark.parametrize("name", sorted(KNOWN))
def test_a_known_fault_applies_to_todays_code(name: str) -> None:
    command = ["git", "apply", "--check", str(PATCHES / f"{name}.patch")]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert (result.returncode, result.stderr) == (0, "")


# -- what the simulation has found: each in the shortest course that showed it -----------------


def test_an_outcome_that_was_not_recorded_has_no_event() -> None:
    """The store is out when the worker's time to stop ends: the event said succeeded."""
    decisions = (
        Decision(1.0, "send", "a", ("plain", 3, "o", 0, 0.0)),
        Decision(1.0, "send", "a", ("abandon", 3, "o", 0, 0.0)),
        Decision(1.1, "outage", "a", ("results", 40.0)),
        Decision(1.2, "drain", "a", (0.0,)),
    )
    for seed in range(3):
        report = run(replace(CALM, seed=seed, decisions=decisions))
        assert report.text == ""


def test_a_task_with_a_permit_runs_on_while_others_wait_for_one() -> None:
    """Requests for more permits renewed the row, and the tasks that ran were not told."""
    decisions = tuple(
        Decision(1.0 + number, "send", "a", ("permitted", 20, "o", 0, 0.0)) for number in range(2)
    )
    report = run(replace(CALM, workers=2, decisions=decisions))
    assert report.text == ""


@pytest.mark.parametrize("seconds", [-10_000_000.0, 4000.0, 10_000_000.0])
def test_a_clock_that_jumps_deletes_nothing_early(seconds: float) -> None:
    """What was old was reckoned by the wall clock of the worker that deleted."""
    decisions = (
        Decision(1.0, "send", "a", ("plain", 3, "o", 0, 0.0)),
        Decision(1.0, "workflow", "a", (("t", "n1", "o"), "f1")),
        Decision(20.0, "clock-jumps", "a", (0.0, seconds)),
        Decision(30.0, "send", "a", ("plain", 3, "o", 0, 0.0)),
    )
    report = run(replace(CALM, kind="storage", quiet_at=300.0, decisions=decisions))
    assert report.text == ""


def test_a_message_that_was_hidden_twice_until_one_time_is_received_once() -> None:
    """A model's fault: the update that was repeated after a lost answer made two entries."""
    queues = StorageQueues(Time().clock())
    queues.create("q", {})
    queues.put("q", "text", 0)
    (message,) = queues.receive("q", 1, 10)
    receipt = queues.update("q", message.name, message.receipt, 0, None)
    queues.update("q", message.name, receipt, 0, None)
    assert len(queues.receive("q", 10, 10)) == 1


@pytest.mark.parametrize(
    ("kind", "noticed"), [("local", True), ("storage", True), ("bus", True), ("local", False)]
)
def test_an_at_most_once_run_that_is_lost_must_end(
    monkeypatch: pytest.MonkeyPatch, kind: str, noticed: bool
) -> None:
    """Its worker is killed in it, and another one notices, unless that is taken away."""
    if not noticed:
        monkeypatch.setattr(LostRuns, "look", lambda *_: None)
        monkeypatch.setattr(world, "STILL_OPEN", 3600.0)  # others are noticed within minutes
    monkeypatch.setattr(Program, "script", lambda *_: Play(seconds=5.0))
    decisions = (
        Decision(1.0, "send", "a", ("once", 3, "o", 0, 0.0)),
        Decision(3.0, "kill", "a", (0.0,)),
    )
    report = run(replace(CALM, kind=kind, quiet_at=600.0, decisions=decisions))
    assert report.faults["kill"] == 1
    assert report.name == ("" if noticed else "everything-ends")
    assert noticed or "a.once" in report.text


@pytest.mark.parametrize("kind", ["local", "storage", "bus"])
def test_an_at_most_once_run_that_was_given_up_has_one_end(kind: str) -> None:
    """Its worker stood still before the record: it was recorded as lost, and said succeeded."""
    decisions = (
        Decision(1.0, "freeze-at", "a", ("record<", 1, 300.0)),
        Decision(1.0, "send", "a", ("once", 1, "o", 0, 0.0)),
    )
    report = run(replace(CALM, kind=kind, workers=2, quiet_at=600.0, decisions=decisions))
    assert report.faults["freeze at a point"] == 1
    assert report.text == ""


@pytest.mark.parametrize("kind", ["local", "storage", "bus"])
def test_an_at_most_once_run_whose_end_was_not_recorded_ends_once(
    monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    """Its worker stopped while the store was away: it said failed, and so did who found it."""
    monkeypatch.setattr(Program, "script", lambda *_: Play(seconds=5.0))
    decisions = (
        Decision(1.0, "send", "a", ("once", 1, "x", 0, 0.0)),
        Decision(3.0, "outage", "a", ("results", 300.0)),
        Decision(4.0, "drain", "a", (0.0,)),
    )
    report = run(replace(CALM, kind=kind, workers=1, quiet_at=600.0, decisions=decisions))
    assert report.faults["drain"] == 1
    assert report.text == ""


@pytest.mark.parametrize("kind", ["local", "storage", "bus"])
def test_half_of_the_courses_have_keys_and_each_version_has_them_in_another_order(
    monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    drawn = Counter(draw(seed).keys for seed in range(400))
    assert drawn.keys() == {"", "signed", "encrypted"}
    assert 150 < drawn[""] < 250
    taken: list[Envelope] = []
    accepted = Book.accepted

    def noted(book: Book, actor: Actor, queue: str, envelopes: Sequence[Envelope]) -> None:
        taken.extend(envelopes)
        accepted(book, actor, queue, envelopes)

    monkeypatch.setattr(Book, "accepted", noted)
    decisions = (
        Decision(1.0, "send", "a", ("plain", 3, "fo", 0, 0.0)),
        Decision(1.0, "deploy", "a"),
        Decision(2.0, "send", "a", ("plain", 3, "fo", 0, 0.0)),
    )
    for keys in ("signed", "encrypted"):
        taken.clear()
        report = run(replace(CALM, kind=kind, keys=keys, decisions=decisions))
        assert report.text == ""
        encrypted = keys == "encrypted"
        assert all(each.message_id.startswith("keyed-") == encrypted for each in taken)
        assert all("aztask-signature-2" in each.headers for each in taken)
        rings = [keys_of(keys, "a", version)["signing_keys"] for version in (1, 2)]
        assert rings[0] == rings[1][::-1] != rings[1]


def test_more_tokens_than_the_limit_has_are_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    decisions = (Decision(1.0, "send", "a", ("cost3", 10, "o", 0, 0.0)),)
    course = replace(CALM, slots=8, quiet_at=600.0, decisions=decisions)
    report = run(course)
    assert (report.text, report.counts["tasks"] > 10) == ("", True)
    monkeypatch.setattr(Limit, "cost_of", lambda *_: 0)
    assert run(course).name == "rate"


@pytest.mark.parametrize(
    ("seed", "flows"),
    [
        pytest.param(10, False, id="10"),
        pytest.param(596779215, False, id="596779215"),
        pytest.param(74005047, True, id="74005047"),
        pytest.param(114822083, True, id="114822083"),
    ],
)
def test_a_seed_that_failed_once_ends_well(seed: int, flows: bool) -> None:
    """On faults of a model or of the book: what is drawn changes with the programs."""
    assert run(draw(seed, flows=flows)).text == ""


@pytest.mark.parametrize("kind", ["local", "storage", "bus"])
def test_a_program_waits_for_messages_on_the_clock_of_the_world(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    waited: list[float] = []

    def sweep(world: World) -> None:
        receiver = world.sender("a").broker.receiver("default", lease=60.0, dead_letter=True)
        began = world.now
        assert receiver.receive(10, 5.0) == []
        waited.append(world.now - began)
        receiver.close()

    def act(world: World) -> None:
        world.act(world.sender("a"), partial(sweep, world))

    monkeypatch.setattr(operations, "probe", act)
    assert run(replace(CALM, kind=kind)).text == ""
    assert len(waited) == 1
    assert waited[0] >= 5.0


def test_a_course_that_reads_the_clock_of_the_machine_fails(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It would be another one on a slower machine."""
    monkeypatch.setattr(operations, "probe", lambda world: world.act(world.sender("a"), read))

    def read() -> None:
        SYSTEM_CLOCK.monotonic()

    assert run(CALM).name == "no-crash"
    assert SYSTEM_CLOCK.monotonic() >= 0.0


def test_a_course_that_waits_for_a_thread_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    """No other thread runs in it, and its time stands still: it would wait for ever."""
    monkeypatch.setattr(
        operations, "probe", lambda world: world.act(world.sender("a"), lambda: Event().wait(0.1))
    )
    report = run(CALM)
    assert (report.name, report.text) == (
        "no-crash",
        "no-crash: a-sender1: RuntimeError: a wait of 0.1 s for another thread",
    )
    assert not Event().wait(0.01)
