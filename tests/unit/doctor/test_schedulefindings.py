"""What the doctor says about schedules and circuit breakers, on a real result store."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from aztask import App
from aztask.address.owner import NO_OWNER
from aztask.limits.breakers import NAME, Breakers, OpenBreaker
from aztask.limits.control import Controls, Reach, Scope
from aztask.operate.findings import LATE_SECONDS, pause_findings, schedule_findings
from aztask.schedules.view import LIVES_SECONDS
from aztask.stores.records.controls import EntryChange
from aztask.stores.records.schedules import schedules_of
from aztask.support.finding import Finding, Level


@pytest.fixture
def app(tmp_path: Path) -> Iterator[Any]:
    address = f"local://{tmp_path}/queues.db"
    made = App("shop", broker=address, results=address)
    made.task(name="shop.work")(len)
    yield made
    made.close()


def found(app: Any, *, named: bool = True) -> dict[str, Finding]:
    return {each.check: each for each in schedule_findings(app, app.results, named=named)}


def change(app: Any, name: str, **fields: Any) -> None:
    engine = app.schedules.engine
    assert engine.change(f"shop.{name}", lambda view: replace(view.schedule, **fields))


def create(app: Any, name: str = "s") -> None:
    app.schedules.create(name, app.tasks["shop.work"].s("ab"), every=3600)


def test_without_schedules_it_says_nothing(app: Any) -> None:
    assert found(app) == {}


def test_schedules_that_are_well_are_one_line(app: Any) -> None:
    create(app)
    create(app, "t")
    assert found(app).keys() == {"schedules"}
    assert found(app)["schedules"].level is Level.OK
    assert found(app)["schedules"].text == "2 schedules, none is late"


def test_one_of_the_code_that_no_worker_has_made(app: Any) -> None:
    app.schedule("nightly", app.tasks["shop.work"].s("ab"), every=3600)
    finding = found(app)["missing"]
    assert finding.level is Level.WARNING
    assert finding.text == "schedules of the code that no worker has made yet: shop.nightly"
    assert "aztask scheduler" in finding.advice
    assert found(app, named=False) == {}, "without an app, nothing is expected"


def test_one_that_no_running_code_claims(app: Any) -> None:
    create(app)
    change(app, "s", claimed_at=time.time() - LIVES_SECONDS + 60.0)
    assert found(app)["schedules"].level is Level.OK
    change(app, "s", claimed_at=time.time() - LIVES_SECONDS - 60.0)
    finding = found(app)["unclaimed"]
    assert finding.level is Level.WARNING
    assert finding.text.startswith("stopped, because no running code claims them: 1: shop.s (since")
    assert "app.schedules.delete" in finding.advice


def test_one_that_is_late(app: Any) -> None:
    create(app)
    last = time.time() // 3600 * 3600
    change(app, "s", watermark=last - 1.0)
    late = found(app).get("late")
    assert (late is not None) is (time.time() - last > LATE_SECONDS)
    change(app, "s", watermark=last - 3601.0)
    text = found(app)["late"].text
    assert text.startswith("late schedules: 1: shop.s (due at ")
    assert text.endswith(", no worker makes it)")


def test_one_whose_occurrence_is_not_sent(app: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    create(app)
    monkeypatch.setattr(app.sends, "send_occurrence", lambda *arguments: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        app.schedules.trigger("s")
    assert "late" not in found(app), "a worker sends it in a moment"
    store = schedules_of(app.results)
    assert store is not None
    now = store.now()
    monkeypatch.setattr(store, "now", lambda: now + LATE_SECONDS + 1.0)
    assert "is not sent" in found(app)["late"].text


def test_paused_and_damaged_ones(app: Any) -> None:
    create(app)
    app.schedules.pause("s")
    app.schedules.engine.store.commit("shop.bad", b"\xc1", None)
    findings = found(app)
    assert findings["paused"].text.startswith("paused schedules: 1: shop.s (since ")
    assert findings["paused"].advice == "to go on, run aztask schedule resume NAME"
    assert findings["damage"].text.startswith("schedules that cannot be read: 1: shop.bad (")


def test_open_circuit_breakers(app: Any) -> None:
    breakers = Breakers(app.results.controls)
    breakers.open(OpenBreaker("shop.work", 0.0, 30.0, "w", "6 of 10 runs failed in 60 s", 2))
    (finding,) = pause_findings(app.results)
    assert finding.level is Level.WARNING
    assert finding.text == (
        "open circuit breakers: 1: task shop.work (since 1970-01-01 00:00 UTC, 6 of 10 runs failed "
        "in 60 s, failed probes: 2)"
    )
    assert "aztask control resume --task NAME" in finding.advice


def test_pauses_without_an_owner(app: Any) -> None:
    former = Controls(app.results.controls.of(NO_OWNER))
    former.pause(Scope.QUEUE, ["orders"], 0.0)
    former.scale(Reach.ALL, [""], 3, 0.0, forget=set())
    first, second = pause_findings(app.results)
    assert first.text == (
        "a release before 0.2 paused or scaled for every broker: queue orders, all workers"
    )
    assert second.text.startswith("paused for all workers: 1: queue orders (since ")


def test_damaged_circuit_breakers(app: Any) -> None:
    app.results.controls.write([EntryChange(NAME, b"damaged")])
    (finding,) = pause_findings(app.results)
    assert finding.level is Level.PROBLEM
    assert "resume --all" in finding.text


def test_one_without_an_owner_that_no_app_adopted_for_a_day(app: Any, tmp_path: Path) -> None:
    free = schedules_of(app.results).of(NO_OWNER)  # type: ignore[union-attr]
    create(app, "s")
    template = app.schedules.view("s").schedule
    for name, age in (("other.new", 3600.0), ("other.old", 90_000.0)):
        at = time.time() - age
        head = replace(template, made_at=at, watermark=at, claimed_at=at)
        assert free.commit(name, head.pack(), None)
    finding = found(app)["unowned"]
    assert finding.text == "schedules without an owner, which no app has adopted: other.old"
    assert "doctor --adopt" in finding.advice
    assert "late" not in found(app)


def test_those_of_another_owner_are_its_own_affair(app: Any, tmp_path: Path) -> None:
    address = f"local://{tmp_path}/queues.db"
    other = App("staging", broker=f"local://{tmp_path}/staging.db", results=address)
    other.task(name="staging.work")(len)
    other.schedules.create("s", other.tasks["staging.work"].s("ab"), every=3600)
    change_of(other, paused_at=time.time())
    assert found(app) == {}
    assert found(app, named=False) == {}
    assert found(other)["paused"].level is Level.WARNING
    other.close()


def change_of(app: Any, **fields: Any) -> None:
    engine = app.schedules.engine
    assert engine.change("staging.s", lambda view: replace(view.schedule, **fields))
