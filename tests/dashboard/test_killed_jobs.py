"""A replay that is asked for in the browser, while dashboard and worker are killed again and again.

``JOBS_LETTERS=100000 python -m pytest tests/dashboard/test_killed_jobs.py`` takes a hundred
thousand.
"""

from __future__ import annotations

import os
import re
import socket
import subprocess
import sys
import time
from collections import Counter
from contextlib import closing

import pytest
from browser import launched
from waiting import wait_until

from aztask import App
from aztask.operate.deadletters import DeadLetters
from aztask.operate.jobs import job
from aztask.settlement import DeadLetter

LETTERS = int(os.environ.get("JOBS_LETTERS", "3000"))
KILLS = 3
PATIENCE = 120 + LETTERS / 50
PLACES = ["one file", "two files"]
SHOP = """
import os
from pathlib import Path
from aztask import App
app = App("shop", broker={broker!r}, results={results!r}, lease=5.0)

@app.task(name="shop.mail")
def mail(number):
    file = os.open({notes!r}, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    os.write(file, f"{{number}}\\n".encode())
    os.close(file)
"""
IMPATIENT = """
import sys
from aztask.operate import jobrunner
jobrunner.LEASE_SECONDS, jobrunner.LOOK_SECONDS, jobrunner.NOTED_EVERY = 2.0, 0.2, 0.1
from aztask.operate.cli.main import run
sys.exit(run(sys.argv[1:]))
"""
"""Runs a command of aztask that takes over the job of a dead process after two seconds."""


class Shop:
    """Dead letters in a folder, and the processes that are killed."""

    def __init__(self, folder, place):
        self.folder = folder
        self.notes = folder / "notes"
        broker = f"local://{folder}/queues.db"
        results = broker if place == PLACES[0] else f"local://{folder}/results.db"
        text = SHOP.format(broker=broker, results=results, notes=str(self.notes))
        (folder / "killedshop.py").write_text(text)
        self.app = App("shop", broker=broker, results=results)
        self.processes = []
        with closing(socket.socket()) as probe:
            probe.bind(("127.0.0.1", 0))
            self.port = probe.getsockname()[1]

    def bury(self):
        self.app.broker.declare("default")
        for number in range(LETTERS):
            self.app.send("shop.mail", [number], task_id=f"m{number}")
        receiver = self.app.broker.receiver("default", lease=60.0)
        left = LETTERS
        while left:
            some = receiver.receive(200, 1.0)
            receiver.settle([(each, DeadLetter("rejected", "no stock")) for each in some])
            left -= len(some)
        receiver.close()

    def start(self):
        """Start a worker and a dashboard; returns the dashboard's address of the login."""
        python = [sys.executable, "-c", IMPATIENT]
        app = ["-A", "killedshop:app"]
        serve = ["dashboard", *app, "--role", "act", "--http", f"127.0.0.1:{self.port}"]
        self._run([*python, "worker", *app, "-c", "2"], subprocess.DEVNULL)
        errors = self._run([*python, *serve], subprocess.PIPE).stderr
        line = errors.readline()
        found = re.search(r"http://\S+/login\?key=\S+", line)
        assert found, line
        wait_until(self._answers, 20, "the dashboard answers")
        return found[0]

    def _answers(self):
        with closing(socket.socket()) as probe:
            return probe.connect_ex(("127.0.0.1", self.port)) == 0

    def _run(self, command, stderr):
        path = f"{self.folder}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"
        environment = {**os.environ, "PYTHONPATH": path}
        process = subprocess.Popen(
            command, cwd=self.folder, env=environment, stderr=stderr, text=True,
            stdout=subprocess.DEVNULL, start_new_session=True,
        )  # fmt: skip
        self.processes.append(process)
        return process

    def kill(self):
        """Kill the worker with its pool, and the dashboard."""
        for process in self.processes:
            if process.poll() is None:
                os.killpg(process.pid, 9)
            process.wait()
            if process.stderr is not None:
                process.stderr.close()
        self.processes.clear()

    def ran(self):
        """The numbers of the letters whose task ran."""
        return set(map(int, self.notes.read_text().split()))


@pytest.fixture(params=PLACES)
def shop(request, tmp_path):
    made = Shop(tmp_path, request.param)
    yield made
    made.kill()
    made.app.close()


def test_each_letter_gets_one_new_generation_whoever_is_killed(shop):
    shop.bury()
    with launched() as browser:
        page = browser.new_page()
        login = shop.start()
        page.goto(login)
        page.goto(login.partition("/login")[0] + "/letters?queue=default")
        page.locator("a.act", has_text="Replay these").first.click()
        asked = page.locator(".ask").inner_text()
        assert asked.startswith(f"This would replay {LETTERS:,} dead letters")
        page.locator("main form button").press("Enter")
        page.wait_for_url("**/jobs?id=*")
        key = re.search(r"id=([^&#]+)", page.url)[1]
        kills = 0
        for share in range(1, KILLS + 1):
            most = LETTERS - LETTERS * share // (KILLS + 2)
            until = time.monotonic() + PATIENCE
            while shop.app.broker.stats("default").dead > most:
                assert time.monotonic() < until, job(shop.app, key)
                time.sleep(0.01)
            shop.kill()
            kills += job(shop.app, key).state == "open"
            login = shop.start()
        assert kills >= 2, "it was over before it was killed; use more letters"
        page.goto(login)
        page.goto(login.partition("/login")[0] + f"/jobs?id={key}")
        done = page.locator(".outcome", has_text=f"{LETTERS:,} of {LETTERS:,} done")
        done.wait_for(timeout=PATIENCE * 1000)
    app = shop.app
    wait_until(lambda: app.broker.stats("default").living == 0, PATIENCE, "the queue is empty")
    dead = list(DeadLetters(app, "default").list(10))
    assert dead == [], Counter((each.reason, each.description) for each in dead)
    found = Counter()
    for number in range(LETTERS):
        run = app.results.get(f"m{number}")
        found[(run.key.generation, run.state.value)] += 1
    assert found == {(1, "succeeded"): LETTERS}
    assert shop.ran() == set(range(LETTERS))
