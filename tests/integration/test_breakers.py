"""Circuit breakers of real workers: one opens it, all obey, one probes, and may be killed."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from breaker_app import call, other
from harness import Site, site_in, wait_until
from test_pausing import events

from aztask.limits.breakers import Open, breakers_of_apps
from aztask.stores.records.base import State
from aztask.stores.records.controls import controls_of

ARGUMENTS = ("-c", "2", "--lease", "3s", "--max-lease", "60s")


@pytest.fixture
def site(tmp_path: Path) -> Iterator[Site]:
    extra = {"LEDGER_PAUSE": "0.3"}
    with site_in(tmp_path / "site", module="breaker_app", extra=extra) as made:
        yield made


def opened(site: Site) -> Open:
    store = controls_of(site.app().results)
    assert store is not None
    return {task: row for each in breakers_of_apps(store) for task, row in each.read().items()}


def run(site: Site, *arguments: str) -> str:
    """What a command writes."""
    command = [sys.executable, "-m", "aztask", "-A", "breaker_app", *arguments]
    done = subprocess.run(
        command,
        check=True,
        timeout=60,
        env=site.environment,
        cwd=site.folder,
        capture_output=True,
        text=True,
    )
    return done.stdout


def test_it_opens_for_all_workers_is_probed_by_one_and_closes(site: Site) -> None:
    app, down = site.app(), site.folder / "down"
    down.touch()
    workers = [site.worker(*ARGUMENTS) for _ in range(2)]
    sent = [app.send(call.name, [f"{number}"]) for number in range(12)]
    wait_until(lambda: call.name in opened(site), 30, "it is open")
    assert app.send(other.name, ["free"]).get(timeout=20) == "free", "other tasks run"
    wait_until(lambda: opened(site)[call.name].failures >= 1, 60, "a probe has failed")
    time.sleep(2.5)  # all have noticed, and what was claimed before has ended
    before = len(site.lines("start"))
    time.sleep(6.0)
    assert len(site.lines("start")) - before <= 3, "only probes, one in four seconds"
    (listed,) = [json.loads(line) for line in run(site, "control", "list", "--json").splitlines()]
    assert (listed["scope"], listed["name"]) == ("breaker", call.name)
    assert f"open circuit breakers: 1: task {call.name}" in run(site, "doctor")
    down.unlink()
    for each in sent:
        assert each.get(timeout=60) in {f"{number}" for number in range(12)}
    assert opened(site) == {}
    reasons = [event.reason or "" for event in events(site, "control_changed")]
    assert sum("paused by its circuit breaker: " in reason for reason in reasons) == 2
    wait_until(
        lambda: (
            sum("has closed" in (each.reason or "") for each in events(site, "control_changed"))
            == 2
        ),
        15,
        "both workers have noticed",
    )
    reasons = [event.reason or "" for event in events(site, "put_off")]
    assert f"the circuit breaker of task {call.name} is open" in reasons
    for each in sent:
        states = [record.state for record in app.results.history(each.id)]  # type: ignore[union-attr]
        assert states.count(State.SNOOZED) == 0, "putting off counts as nothing"
    assert [worker.stop() for worker in workers] == [0, 0]


def test_the_probe_of_a_killed_worker_is_taken_over(site: Site) -> None:
    app, down, hang = site.app(), site.folder / "down", site.folder / "hang"
    down.touch()
    workers = [site.worker(*ARGUMENTS) for _ in range(2)]
    sent = [app.send(call.name, [f"{number}"]) for number in range(8)]
    wait_until(lambda: call.name in opened(site), 30, "it is open")
    hang.touch()
    wait_until(lambda: opened(site)[call.name].probe_by, 60, "one probes")
    holder = opened(site)[call.name].probe_by
    (victim,) = [each for each in workers if holder.split("-")[-2] == str(each.process.pid)]
    before = len(site.lines("start"))
    wait_until(lambda: len(site.lines("start")) > before - 1, 20, "it runs")
    victim.kill()
    victim.wait()
    down.unlink()
    hang.unlink()
    for each in sent:
        each.get(timeout=90)
    assert opened(site) == {}
    (left,) = [each for each in workers if each is not victim]
    assert left.stop() == 0, left.log


def test_an_operator_closes_it(site: Site) -> None:
    app, down = site.app(), site.folder / "down"
    down.touch()
    worker = site.worker(*ARGUMENTS)
    sent: list[Any] = [app.send(call.name, [f"{number}"]) for number in range(6)]
    wait_until(lambda: call.name in opened(site), 30, "it is open")
    answer = run(site, "control", "resume", "--task", call.name)
    assert answer == f"the circuit breaker of task {call.name} is closed\n"
    down.unlink()
    for each in sent:
        each.get(timeout=60)
    assert worker.stop() == 0, worker.log
