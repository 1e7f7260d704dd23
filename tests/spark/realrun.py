"""A real run: workers killed and frozen, tasks that fail in every way, and their events."""

import json
import os
import signal
import sys
import time
from importlib import import_module
from pathlib import Path

from aztask import App, chain, group
from aztask.stores.events.sink import recover

INTEGRATION = Path(__file__).parents[1] / "integration"
QUICK = int(os.environ.get("AZTASK_REAL_RUN_TASKS", "20000"))
LEASE = 2.0
SECONDS = 200.0  # to wait for a run that another process of the tests makes


def made_once(folder):
    """(the directory of the events, the number of tasks); the first process that asks makes it."""
    done = folder / "done"
    try:
        folder.mkdir()
    except FileExistsError:
        give_up_at = time.monotonic() + SECONDS
        while not done.exists():
            assert time.monotonic() < give_up_at, (
                "another process of the tests did not make the run"
            )
            time.sleep(0.1)
    else:
        events, number = made(folder)
        told = folder / "telling"
        told.write_text(json.dumps([str(events), number]))
        told.rename(done)
    events, number = json.loads(done.read_text())
    return Path(events), number


def made(folder):
    """Send the tasks, run, kill and freeze workers, and wait until all tasks have ended."""
    sys.path.insert(0, str(INTEGRATION))
    harness = import_module("harness")
    sys.path.remove(str(INTEGRATION))
    with harness.site_in(folder / "site") as site:
        app, tasks = sender(site)
        number = send_all(app, tasks)
        app.close()
        arguments = ("-c", "4", "--lease", f"{LEASE}s")
        first, second = site.worker(*arguments), site.worker(*arguments)

        def left():
            stats = site.app().broker.stats("default")
            return (stats.active or 0) + (stats.leased or 0) + (stats.scheduled or 0)

        harness.wait_until(lambda: left() < 0.8 * number, 60, "a fifth is done")
        first.signal(signal.SIGKILL)
        second.freeze()
        third = site.worker(*arguments)
        harness.wait_until(lambda: left() < 0.4 * number, 60, "more is done")
        time.sleep(LEASE + 0.5)  # the frozen worker has lost its leases by now
        second.signal(signal.SIGCONT)
        harness.wait_until(lambda: left() == 0, 90, "everything is done")
        assert third.stop() == 0
        assert second.stop() == 0
        recover(site.events)
        return site.events, number


def made_workflows(folder, number):
    """Run so many workflows to their ends on one worker; returns the directory of their events.

    Each is a task, a group with a chain in it and a task that fails at first, and a last task.
    Which member of the group is the slowest, differs.
    """
    sys.path.insert(0, str(INTEGRATION))
    harness = import_module("harness")
    sys.path.remove(str(INTEGRATION))
    with harness.site_in(folder / "site") as site:
        app, tasks = sender(site)
        work, flaky = tasks["work"].si, tasks["flaky"].si
        for n in range(number):
            slow = [0.05 if n % 3 == place else 0.0 for place in range(3)]
            members = group(
                chain(work(f"{n}a", slow[0]), work(f"{n}b", slow[0])),
                chain(work(f"{n}c", slow[1]), flaky(f"{n}d", 1)) if n % 2 else flaky(f"{n}d", 1),
                work(f"{n}e", slow[2]),
            )
            chain(work(f"{n}first", 0.01), members, work(f"{n}last")).delay(workflow_id=f"w{n}")
        app.close()
        worker = site.worker("-c", "4")

        def left():
            stats = site.app().broker.stats("default")
            return (stats.active or 0) + (stats.leased or 0) + (stats.scheduled or 0)

        harness.wait_until(lambda: left() == 0, 120, "all workflows have ended")
        assert worker.stop() == 0
        return site.events


def sender(site):
    """Import the tasks of `ledger_app`, to send them from here, with events."""
    app = App("ledger", broker=site.broker, results=site.results, events=str(site.events))

    def named(name):
        def task(*args):
            raise AssertionError("not here")

        task.__name__ = name
        return app.task(task)

    names = ("noop", "flaky", "rejecting", "work", "snoozing", "too_long", "ending")
    return app, {name: named(name) for name in names}


def send_all(app, tasks):
    """Send a few tasks of each kind and many no-ops; returns their number."""
    calls = {
        "too_long": [(f"l{n}",) for n in range(2)],
        "ending": [(f"e{n}", "segfault") for n in range(2)],
        "flaky": [(f"f{n}", 1 + n % 5) for n in range(300)],
        "rejecting": [(f"r{n}", "no") for n in range(40)],
        "work": [(f"w{n}", 0.02) for n in range(200)],
        "snoozing": [(f"s{n}", 2) for n in range(50)],
        "noop": [()] * QUICK,
    }
    for name, arguments in calls.items():
        tasks[name].map(arguments)
    tasks["noop"].with_options(expires=0.001).map([()] * 20)
    return sum(map(len, calls.values())) + 20
