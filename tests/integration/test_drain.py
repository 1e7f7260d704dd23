"""How a worker ends: tasks are told and may clean up, and every cut is logged. Recycled pools."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from waiting import wait_until

APP = """
import asyncio, os, pathlib, subprocess, time
from aztask import App, current_context
from aztask.errors import WorkerStopping

HERE = pathlib.Path({folder!r})
app = App("shop", broker=f"local:///{{HERE}}/queues.db", results=f"local:///{{HERE}}/queues.db")
CLOSING = float(os.environ.get("CLOSING_SECONDS", "0"))
KEPT = []

def note(text):
    with open(HERE / "notes", "a") as notes:
        notes.write(f"{{text}}\\n")

@app.lifespan
def client():
    with open(HERE / "opened", "a") as opened:
        opened.write("x")
    yield
    note("closing")
    time.sleep(CLOSING)
    note("closed")

@app.task
def plain(seconds):
    note("started")
    end = time.monotonic() + seconds
    try:
        while time.monotonic() < end:
            time.sleep(0.02)
            if current_context().stopping:
                note("stopping")
                while time.monotonic() < end:
                    time.sleep(0.02)
    except WorkerStopping:
        note("told")
        raise
    finally:
        note("cleaned")
    note("done")

@app.task
async def coroutine(seconds):
    note("started")
    try:
        await asyncio.sleep(seconds)
    except asyncio.CancelledError:
        note("told")
        await asyncio.sleep(0.2)
        raise
    finally:
        note("cleaned")

@app.task
def saves(seconds):
    note("started")
    try:
        time.sleep(seconds)
    except WorkerStopping:
        return "saved"

@app.task(stop_grace=0.3)
def stubborn(seconds):
    note("started")
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        try:
            time.sleep(0.05)
        except WorkerStopping:
            note("ignored")

@app.task(time_limit=1)
def starts_a_program():
    program = subprocess.Popen(["sleep", "300"])
    note(f"program {{program.pid}}")
    program.wait()

@app.task
def pid(seconds=0.0):
    time.sleep(seconds)
    return os.getpid()

@app.task
def leak(megabytes):
    KEPT.append(b"x" * (megabytes << 20))
    return os.getpid()

@app.task
def size(data):
    time.sleep(0.05)
    return len(data)
"""
POOLS = ("processes", "threads", "asyncio")


class Place:
    def __init__(self, folder):
        self.folder = folder
        (folder / "shop.py").write_text(APP.format(folder=str(folder)))
        self.workers = []

    def python(self, script):
        ended = subprocess.run(
            [sys.executable, "-c", f"import json, shop\n{script}"],
            cwd=self.folder,
            capture_output=True,
            text=True,
            timeout=90,
            check=False,
        )
        assert ended.returncode == 0, ended.stderr
        return ended.stdout

    def send(self, name, *args, task_id):
        self.python(f"shop.{name}.with_options(task_id={task_id!r}).delay(*{args!r})")

    def worker(self, *arguments, **environment):
        self.log = self.folder / f"worker-{len(self.workers)}.log"
        with self.log.open("wb") as log:
            process = subprocess.Popen(
                [sys.executable, "-m", "aztask", "worker", "-A", "shop:app", *arguments],
                cwd=self.folder,
                env={**os.environ, **environment},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
            )
        self.workers.append(process)
        return process

    def notes(self):
        path = self.folder / "notes"
        return path.read_text().split("\n")[:-1] if path.exists() else []

    def noted(self, text, count=1):
        wait_until(lambda: self.notes().count(text) >= count, 30, f"{text} is noted")

    def opened(self, count):
        """Wait until so many processes have opened the lifespan since the beginning."""
        path = self.folder / "opened"
        wait_until(lambda: path.exists() and len(path.read_text()) >= count, 30, "all serve")
        time.sleep(0.3)  # the worker hears of it

    def state(self, task_id):
        found = self.python(
            f"run = shop.app.results.get({task_id!r})\nprint(json.dumps([run.state, run.starts]))"
        )
        return json.loads(found)

    def ended(self, worker, *numbers, pause=0.3):
        for number in numbers:
            worker.send_signal(number)
            time.sleep(pause)
        assert worker.wait(60) == 0, self.log.read_text()
        return self.log.read_text()


@pytest.fixture
def place(tmp_path):
    place = Place(tmp_path)
    yield place
    for worker in place.workers:
        if worker.poll() is None:
            worker.kill()
        worker.wait()


@pytest.mark.parametrize("pool", POOLS)
@pytest.mark.parametrize("task", ["plain", "coroutine"])
def test_a_task_is_told_cleans_up_and_is_given_back(place, pool, task):
    place.send(task, 60, task_id="long")
    worker = place.worker("-c", "2", "--pool", pool, "--shutdown-timeout", "1s")
    place.noted("started")
    place.opened(2 if pool == "processes" else 1)
    log = place.ended(worker, signal.SIGTERM)
    notes = place.notes()
    assert notes.index("told") < notes.index("cleaned")
    assert "done" not in notes
    assert notes.count("closing") == notes.count("closed") == (2 if pool == "processes" else 1)
    if task == "plain":
        assert notes.index("stopping") < notes.index("told")
    assert f"task shop.{task} long is given back" in log
    assert "Traceback" not in log
    assert place.state("long") == ["pending", 0]


def test_a_task_that_returns_after_it_was_told_has_succeeded(place):
    place.send("saves", 60, task_id="saves")
    worker = place.worker("-c", "1", "--shutdown-timeout", "500ms")
    place.noted("started")
    place.ended(worker, signal.SIGTERM)
    assert place.state("saves")[0] == "succeeded"


@pytest.mark.parametrize("pool", POOLS)
def test_a_task_that_does_not_stop_is_killed_and_its_idle_siblings_close(place, pool):
    place.send("stubborn", 60, task_id="stubborn")
    worker = place.worker("-c", "3", "--pool", pool, "--shutdown-timeout", "500ms")
    place.noted("started")
    place.opened(3 if pool == "processes" else 1)
    log = place.ended(worker, signal.SIGTERM)
    assert "task shop.stubborn stubborn did not stop: the worker stops" in log
    assert "task shop.stubborn stubborn is given back" in log
    if pool == "processes":
        assert place.notes().count("closed") == 2
    assert place.state("stubborn") == ["pending", 0]


def test_closings_get_their_time_and_a_cut_one_is_logged(place):
    worker = place.worker("-c", "2", CLOSING_SECONDS="7")
    place.python("assert shop.pid.delay().get(timeout=60)")
    place.opened(2)
    log = place.ended(worker, signal.SIGTERM)
    assert place.notes().count("closed") == 2
    assert "is killed while its lifespans" not in log
    worker = place.worker("-c", "2", "--shutdown-grace", "1s", CLOSING_SECONDS="7")
    place.python("assert shop.pid.delay().get(timeout=60)")
    place.opened(4)
    log = place.ended(worker, signal.SIGTERM)
    assert place.notes().count("closed") == 2
    assert log.count("is killed while its lifespans or process hooks close; raise") == 2


def test_a_closing_that_is_told_as_cut_is_cut(place):
    worker = place.worker("-c", "1", "--shutdown-grace", "1s", CLOSING_SECONDS="4")
    place.python("assert shop.pid.delay().get(timeout=60)")
    log = place.ended(worker, signal.SIGTERM)
    assert "is killed while its lifespans or process hooks close" in log
    assert "closed" not in place.notes()


def test_a_process_that_is_killed_with_its_task_says_that_it_closes_nothing(place):
    place.send("plain", 60, task_id="long")
    worker = place.worker("-c", "1")
    place.noted("started")
    log = place.ended(worker, signal.SIGQUIT)
    assert "is killed before its lifespans or process hooks have closed" in log
    assert "the end of task shop.plain long" in log
    assert "closing" not in place.notes()


def test_a_second_signal_cuts_the_closings_and_says_so(place):
    worker = place.worker("-c", "1", CLOSING_SECONDS="60")
    place.python("assert shop.pid.delay().get(timeout=60)")
    started = time.monotonic()
    log = place.ended(worker, signal.SIGTERM, signal.SIGTERM, pause=1.0)
    assert time.monotonic() - started < 30
    cut = "is killed while its lifespans or process hooks close"
    assert f"{cut}; the worker was told to end at once" in log
    assert "--shutdown-grace" not in log


def test_a_hard_time_limit_ends_what_the_task_started(place):
    place.send("starts_a_program", task_id="program")
    worker = place.worker("-c", "1")
    wait_until(lambda: any("program" in each for each in place.notes()), 30, "it has started one")
    pid = int(next(each for each in place.notes() if "program" in each).split()[1])
    wait_until(lambda: not is_alive(pid), 30, "the program has ended")
    place.ended(worker, signal.SIGTERM)


def is_alive(pid):
    try:
        with Path(f"/proc/{pid}/stat").open() as stat:
            return stat.read().rsplit(")", 1)[1].split()[0] != "Z"
    except OSError:
        return False


@pytest.mark.parametrize("pool", POOLS)
def test_a_process_is_replaced_after_so_many_tasks_and_its_siblings_go_on(place, pool):
    worker = place.worker("-c", "2", "--pool", pool, "--max-tasks-per-child", "5")
    script = (
        "long = shop.plain.delay(6)\n"
        "pids = [shop.pid.delay().get(timeout=60) for _ in range(10)]\n"
        "import time; give_up_at = time.monotonic() + 30\n"
        "while len(set(pids)) < 2 and time.monotonic() < give_up_at:\n"
        "    time.sleep(0.2); pids.append(shop.pid.delay().get(timeout=60))\n"
        "pids += [shop.pid.delay().get(timeout=60) for _ in range(10)]\n"
        "long.get(timeout=60)\n"
        "print(json.dumps([len(set(pids)), shop.app.results.get(long.id).starts]))\n"
    )
    different, starts = json.loads(place.python(script))
    assert different >= 2
    assert starts == 1
    log = place.ended(worker, signal.SIGTERM)
    assert "is replaced: it has run" in log
    assert "ended while it ran" not in log


def test_a_process_that_uses_too_much_memory_is_replaced(place):
    worker = place.worker("-c", "1", "--max-memory-per-child", "250MB")
    script = (
        "import time\n"
        "pids = []\n"
        "for _ in range(6):\n"
        "    pids.append(shop.leak.delay(100).get(timeout=60)); time.sleep(1.2)\n"
        "print(len(set(pids)))\n"
    )
    assert int(place.python(script)) >= 2
    assert "is replaced: it uses" in place.ended(worker, signal.SIGTERM)


def test_large_messages_are_not_received_by_the_hundred(place):
    place.python("shop.size.map([('x' * 1_000_000,)] * 60)")
    worker = place.worker("-c", "1", "--prefetch", "50", "--prefetch-bytes", "8MB")
    script = (
        "import time\n"
        "most, give_up_at = 0, time.monotonic() + 60\n"
        "while (stats := shop.app.broker.stats('default')).active + stats.leased:\n"
        "    most = max(most, stats.leased); time.sleep(0.01)\n"
        "    assert time.monotonic() < give_up_at\n"
        "print(most)\n"
    )
    assert 2 <= int(place.python(script)) <= 20
    place.ended(worker, signal.SIGTERM)
