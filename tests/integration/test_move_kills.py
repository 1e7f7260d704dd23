"""A move to another address that is killed at each of its steps, and run again until it ends.

Between two files, two Service Bus emulators (one without duplicate detection), and two Azurites.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from azurite import running
from bus import address_at
from harness import HERE, ROOT, Site, wait_until
from ledger_app import fail_unless, retry_later, sleeper, work
from mover import app_at
from session_app import step

from aztask import App
from aztask.limits.control import Controls, Scope
from aztask.operate.deadletters.view import DeadLetters, Selection
from aztask.queues.base import QueueOptions
from aztask.stores.records.base import State
from aztask.stores.records.controls import controls_of
from aztask.testing import emulator

LEASE = 5.0
STEPS = (
    "move-rows:KILL",
    "move-planned:KILL",
    "move-sent:KILL",
    "move-removed:KILL",
    "move-sent:KILL:7",
    "move-removed:KILL:12",
)
"""Before the first message; then with dead letters, and with those that wait, are scheduled or in
sessions."""
ARGUMENTS = ("--pool", "processes", "-c", "2", "--lease", f"{LEASE:g}s", "--max-lease", "60s")
ORDER = 8


@dataclass
class Region:
    """One address of a broker, and for an emulator that of its administration."""

    broker: str
    admin: str = ""
    sessions: bool = True
    defers: bool = True


@dataclass
class Pair:
    """Two regions with one result store."""

    old: Region
    new: Region
    folder: Path
    stack: ExitStack = field(default_factory=ExitStack)

    @property
    def results(self) -> str:
        return f"local://{self.folder}/results.db"

    def app(self, region: Region) -> App:
        made = app_at(region.broker, region.admin, self.results)
        self.stack.callback(made.close)
        return made

    def site(self, region: Region, module: str = "ledger_app") -> Site:
        name = "old" if region is self.old else "new"
        extra = {"LEDGER_LEASE": f"{LEASE}", "LEDGER_STRATEGIES": "defer"}
        if not region.defers:
            extra["LEDGER_STRATEGIES"] = ""
        if region.admin:
            extra["AZTASK_SERVICEBUS_ADMIN"] = region.admin
        folder = self.folder / f"{name}-{module}"
        made = Site(folder, region.broker, self.results, extra=extra, module=module)
        made.ledger = self.folder / "ledger"
        self.stack.callback(made.close)
        return made

    def move(self, failpoint: str = "", *, back: bool = False) -> int:
        """Run the mover; returns its exit code, negative for a signal."""
        here, there = (self.new, self.old) if back else (self.old, self.new)
        environment = {
            **os.environ,
            "PYTHONPATH": os.pathsep.join([str(ROOT), str(HERE)]),
            "MOVE_OLD": here.broker,
            "MOVE_OLD_ADMIN": here.admin,
            "MOVE_NEW": there.broker,
            "MOVE_NEW_ADMIN": there.admin,
            "MOVE_RESULTS": self.results,
            "MOVE_LOG": str(self.folder / "moved"),
        }
        if failpoint:
            environment["AZTASK_FAILPOINT"] = failpoint
        done = subprocess.run(
            [sys.executable, str(HERE / "mover.py")],
            env=environment,
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
        )
        assert done.returncode in (0, 1, -signal.SIGKILL), done.stderr
        assert "Traceback" not in done.stderr or failpoint, done.stderr
        return done.returncode

    def move_until_empty(self) -> None:
        """Run it as long as messages are left: those that a killed mover still holds."""
        give_up_at = time.monotonic() + 90
        while self.move() != 0:
            assert time.monotonic() < give_up_at, (self.folder / "moved").read_text()
            time.sleep(0.5)


@contextmanager
def regions(kind: str, folder: Path) -> Iterator[tuple[Region, Region]]:
    if kind == "files":
        yield Region(f"local://{folder}/old.db"), Region(f"local://{folder}/new.db")
    elif kind == "storage queues":
        with ExitStack() as stack:
            made = []
            for name in ("old", "new"):
                (folder / name).mkdir()
                server = stack.enter_context(running(folder / name, service="queue"))
                text = server.connection_string
                app = app_at(text, "", f"local://{folder}/results.db")
                app.broker.declare("default")
                app.close()
                made.append(Region(text, sessions=False, defers=False))
            yield made[0], made[1]
    else:
        window = 600.0 if kind == "service bus" else 0.0
        with emulator() as first, emulator() as second:
            both = []
            for bus in (first, second):
                region = Region(address_at(bus), bus.admin_connection_string)
                app = app_at(region.broker, region.admin, f"local://{folder}/results.db")
                options = QueueOptions(lease=LEASE, duplicate_window=window or None)
                app.broker.declare("default", options)
                in_order = QueueOptions(lease=LEASE, sessions=True)
                app.broker.declare("orders", in_order)
                app.close()
                both.append(region)
            yield both[0], both[1]


@pytest.fixture(params=["files", "storage queues", "service bus", "service bus, no detection"])
def pair(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Pair]:
    with regions(request.param, tmp_path) as (old, new):
        made = Pair(old, new, tmp_path)
        with made.stack:
            yield made


def lived_in(pair: Pair) -> list[str]:
    """Something of every kind at the old address; returns the ids of what has to succeed."""
    app, site = pair.app(pair.old), pair.site(pair.old)
    app.send(fail_unless.name, ["dead", str(pair.folder / "file")], task_id="dead")
    app.send(sleeper.name, ["parked", 4.0], task_id="parked")
    late = "retried"
    named = f"{retry_later.name}-defer" if pair.old.defers else retry_later.name
    app.send(named, [late, 6.0], task_id=late)
    first = site.worker("-Q", "default", *ARGUMENTS)
    try:
        wait_until(lambda: app.broker.stats("default").dead == 1, 30, "a dead letter")
    except AssertionError as error:
        raise AssertionError(first.log) from error
    wait_until(lambda: site.counts("step-one"), 30, "a parked run")
    wait_until(lambda: len(app.results.history(late)) > 0, 30, "a retry")
    time.sleep(0.5)
    assert first.stop() == 0, first.log
    app.send(work.name, ["held"], task_id="held")
    killed = site.worker("-Q", "default", *ARGUMENTS, AZTASK_FAILPOINT="claimed:KILL")
    assert killed.wait() == -signal.SIGKILL, killed.log
    names = [f"w{number}" for number in range(30)]
    for name in names:
        app.send(work.name, [name], task_id=name)
    app.send(work.name, ["scheduled"], task_id="scheduled", delay=12.0)
    if pair.old.sessions:
        orders = App("sessions", broker=app.broker, results=pair.results)
        orders.queue("orders", sessions=True)
        for number in range(ORDER):
            for session in ("a", "b"):
                given = {"task_id": f"{session}{number}", "session": session}
                orders.send(step.name, [number], queue="orders", **given)
        names += [f"{session}{number}" for number in range(ORDER) for session in ("a", "b")]
    time.sleep(16.0)  # the killed worker is silent, and its leases have ended
    app.send(work.name, ["later"], task_id="later", delay=4.0)
    return [*names, "parked", late, "held", "scheduled", "later"]


def ended(pair: Pair, names: list[str]) -> None:
    """All that was sent ends at the new address: each once, sessions in order, dead ones dead."""
    app, site = pair.app(pair.new), pair.site(pair.new)
    workers = [site.worker("-Q", "default", *ARGUMENTS)]
    if pair.new.sessions:
        workers.append(pair.site(pair.new, "session_app").worker("-Q", "orders", *ARGUMENTS))
    for name in names:
        app.result(name).get(timeout=60)
    for name in names:
        ends = [run for run in app.results.history(name) if run.state.final]
        assert [run.state for run in ends] == [State.SUCCEEDED], name
    wait_until(lambda: app.broker.stats("default").living == 0, 30, "all is settled")
    # Without duplicate detection, what was sent twice may be there twice.
    wait_until(lambda: app.broker.stats("default").dead in (1, 2), 10, "the dead letter is there")
    counts = site.counts("end")
    assert {name: counts[name] for name in ("held", "scheduled", "later", "w0", "w29")} == {
        **dict.fromkeys(("held", "scheduled", "later", "w0", "w29"), 1)
    }
    assert set(counts.values()) == {1}
    assert site.counts("start")["dead"] == 1
    if pair.new.sessions:
        for session in ("a", "b"):
            keys = [each.key for each in site.lines("end") if each.key.startswith(f"{session}/")]
            assert keys == [f"{session}/{number}" for number in range(ORDER)]
    old = pair.app(pair.old).broker
    for queue in old.queues():
        stats = old.stats(queue)
        assert (stats.living, stats.dead) == (0, 0), queue
    (pair.folder / "file").write_text("")
    assert DeadLetters(app, "default").replay(Selection(everything=True)).done in (1, 2)
    assert app.result("dead").get(timeout=30) == "dead"
    for worker in workers:
        assert worker.stop() == 0, worker.log


def test_killed_at_each_step(pair: Pair) -> None:
    """One move, whose process dies at one step after the other."""
    names = lived_in(pair)
    for failpoint in STEPS:
        code = pair.move(failpoint)
        if code == 0 and not pair.old.sessions and failpoint.count(":") == 2:
            # What may have started becomes visible last: the one before died behind the others.
            break
        assert code == -signal.SIGKILL, failpoint
        time.sleep(LEASE + 1.0)  # what the dead one has leased comes again
    pair.move_until_empty()
    ended(pair, names)


def test_there_and_back_again(pair: Pair) -> None:
    """Within the window of duplicate detection, which must not take a message for its own copy."""
    app = pair.app(pair.old)
    for number in range(10):
        app.send(work.name, [f"w{number}"], task_id=f"w{number}")
    pair.move_until_empty()
    assert pair.app(pair.new).broker.stats("default").living == 10
    while pair.move(back=True) != 0:
        pass
    assert app.broker.stats("default").living == 10
    pair.move_until_empty()
    assert pair.app(pair.new).broker.stats("default").living == 10


def test_what_is_sent_to_the_old_address_is_found_again(pair: Pair) -> None:
    """A worker that is started there runs nothing, and a second move takes what came since."""
    app = pair.app(pair.old)
    app.send(work.name, ["early"], task_id="early")
    pair.move_until_empty()
    app.send(work.name, ["late"], task_id="late")
    forgotten = pair.site(pair.old).worker("-Q", "default", *ARGUMENTS)
    time.sleep(6.0)
    assert forgotten.stop() == 0, forgotten.log
    assert pair.site(pair.old).counts("start") == {}
    time.sleep(0.5)
    pair.move_until_empty()
    new = pair.app(pair.new)
    worker = pair.site(pair.new).worker("-Q", "default", *ARGUMENTS)
    assert new.result("early").get(timeout=30) == "early"
    assert new.result("late").get(timeout=30) == "late"
    assert worker.stop() == 0, worker.log
    controls = controls_of(new.results)
    assert controls is not None
    assert not Controls(controls).read().queue_paused("default")
    paused = Controls(controls.of(app.owner)).read().listed()
    assert (Scope.QUEUE, "default") in {(each.scope, each.name) for each in paused}
