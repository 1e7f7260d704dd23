"""What a seeded chaos runs beside its many small tasks.

* Debounced calls with large arguments, some of whose senders die.
* A workflow with large arguments and results that is open from the beginning until the end.
* Tasks that clean up slowly where their worker drains, or where they are cancelled.

Meanwhile `aztask doctor --collect` removes the payloads that nothing needs: never one of these.
"""

from __future__ import annotations

import json
import random
import signal
import subprocess
import sys
import time

from harness import Site, wait_until
from mixture_app import LARGE, MEMBERS, careful, careful_later, weighed
from payloadsite import app_of, collect, stored

from aztask.stores.records.base import State

CAREFUL = 6
KEYS = 3
CALLS = 4
CLEANING = (0.2, 1.5, 6.0)
"""The last one is longer than the grace of a worker that drains."""

DRAINING = ("--shutdown-timeout", "300ms", "--shutdown-grace", "2s")
"""Arguments of the workers."""

CALL = "from mixture_app import *\nweighed.delay({key!r}, {number}, b'x' * {size})\n"
OPEN = "from mixture_app import *\nlong_open({path!r}).delay(workflow_id='long')\n"


class Mixture:
    """The other tasks of a chaos; its site runs `mixture_app`."""

    def __init__(self, site: Site, dice: random.Random) -> None:
        site.module = "mixture_app"
        options = {"payloads": f"{site.folder}/payloads/", "payload_threshold": LARGE // 2}
        site.extra["LEDGER_OPTIONS"] = json.dumps(options)
        site.app().close()
        site._app = app_of(site, **options)
        self._site, self._dice = site, dice
        self._gate = site.folder / "gate"
        self._cancelled: dict[str, bool] = {}
        self._last: dict[str, str] = {}
        self._calls = [(f"d{key}", number) for number in range(CALLS) for key in range(KEYS)]
        self._next = time.monotonic()
        task = site.app().task(name=weighed.name, unique=lambda key, *rest: key, debounce=1.0)
        self._weighed = task(weighed.function)

    def begin(self) -> None:
        """Send what is there from the beginning; a sender of a debounced call dies."""
        dice = self._dice
        self._run(OPEN.format(path=str(self._gate)))
        step = dice.choice(["uploaded", "unique-taken"])
        code = CALL.format(key=f"d{dice.randrange(KEYS)}", number=0, size=LARGE)
        self._run(code, -signal.SIGKILL, AZTASK_FAILPOINT=f"{step}:KILL")

    def go_on(self) -> tuple[str, ...]:
        """Do what is due; called all the time, about ten times a second."""
        if time.monotonic() >= self._next:
            self._next = time.monotonic() + self._dice.uniform(0.1, 1.5)
            self._dice.choice([self._call, self._careful, self._cancel, self._collect])()
        return ()

    def end(self) -> str:
        """Wait for all of it, and check it; returns what happened, as text."""
        site, app = self._site, self._site.app()
        while self._calls:
            self._call()
        while len(self._cancelled) < CAREFUL:
            self._careful()
        self._cancel_one_that_runs()
        for key, name in self._last.items():
            wait_until(lambda name=name: site.lines("end", name), 120, f"{key}: its last call ran")
        for task_id in self._cancelled:
            wait_until(lambda task_id=task_id: app.result(task_id).ready(), 120, f"{task_id} ends")
        result = app.workflows.result("long")
        wait_until(lambda: result.progress.done >= MEMBERS, 120, "all but the gate have ended")
        collect(site, after=app.settings.result_retention_seconds + 4 * 3600.0)
        assert not result.ready()
        self._gate.touch()
        assert result.get(timeout=120) == [*[2 * LARGE] * MEMBERS, "open"]
        for task_id, cancelled in self._cancelled.items():
            state = app.results.history(task_id)[-1].state
            assert state is State.SUCCEEDED or (cancelled and state is State.CANCELLED), task_id
        told, cleaned = len(site.lines("told")), len(site.lines("cleaned"))
        return f"{told} told, {cleaned} cleaned up, {sum(self._cancelled.values())} cancelled"

    def leave_nothing(self) -> None:
        """Assert that no argument stays behind: what the kills left is collected."""
        told = collect(self._site)
        if "payload_lifetime" in told:  # a Storage queue shows no more than 32 dead letters
            collect(self._site, after=self._site.app().settings.payload_lifetime_seconds + 7200.0)
        assert stored(self._site) == []

    def _call(self) -> None:
        if self._calls:
            key, number = self._calls.pop(0)
            size = LARGE + number
            self._weighed.delay(key, number, b"x" * size)
            self._last[key] = f"{key}-{number}-{size}"

    def _careful(self) -> None:
        """Send one more task that cleans up, while there are fewer than `CAREFUL`."""
        if len(self._cancelled) < CAREFUL:
            task_id = f"c{len(self._cancelled)}"
            arguments = [task_id, self._dice.choice([1.0, 2.0, 4.0]), self._dice.choice(CLEANING)]
            task = self._dice.choice([careful, careful_later])
            self._site.app().send(task.name, arguments, task_id=task_id)
            self._cancelled[task_id] = False

    def _cancel(self) -> None:
        """Cancel a careful task that has started, perhaps; at most half of them."""
        started = self._site.counts("start")
        left = [one for one, gone in self._cancelled.items() if not gone and one in started]
        if left and sum(self._cancelled.values()) < CAREFUL // 2:
            task_id = self._dice.choice(left)
            self._cancelled[task_id] = True
            self._site.app().result(task_id).cancel(running=True)

    def _cancel_one_that_runs(self) -> None:
        """So that with each seed at least one is told. (A second later, it would be killed.)"""
        app = self._site.app()
        app.send(careful.name, ["last", 600.0, CLEANING[1]], task_id="last")
        wait_until(lambda: self._site.lines("start", "last"), 120, "it runs")
        app.result("last").cancel(running=True)
        self._cancelled["last"] = True
        wait_until(lambda: self._site.lines("told", "last"), 60, "it is told to stop")

    def _collect(self) -> None:
        collect(self._site)

    def _run(self, code: str, code_of_end: int = 0, **extra: str) -> None:
        site = self._site
        done = subprocess.run(
            [sys.executable, "-c", code],
            env={**site.environment, **extra},
            cwd=site.folder,
            timeout=120,
            check=False,
        )
        assert done.returncode == code_of_end
