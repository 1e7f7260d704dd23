"""An unchanged Celery app on an aztask broker: real workers, a real kill."""

import json
import os
import signal
import subprocess
import sys
import textwrap
import time
from datetime import datetime
from pathlib import Path

import pytest

from aztask.message.envelope import Envelope
from aztask.queues.engine import Database
from aztask.queues.local.broker import LocalBroker

APP = """
    import os, time
    from celery import Celery
    from aztask.celery import transport

    transport.register()
    app = Celery("celery_app", broker="aztask://")
    app.conf.update(
        broker_transport_options={"broker": os.environ["BROKER"], "lease": 1.5},
        task_acks_late=True,
        task_ignore_result=True,
        worker_prefetch_multiplier=2,
        worker_proc_alive_timeout=30,
    )
    app.conf.broker_transport_options["remote_control"] = "UNCONTROLLED" not in os.environ

    if order := os.environ.get("PRIORITY_ORDER"):
        app.conf.worker_prefetch_multiplier = 1
        app.conf.broker_transport_options.update(
            priorities={"high": 4, "low": 1}, order=order
        )

    def note(line):
        with open(os.environ["NOTES"], "a") as file:
            file.write(line + chr(10))

    @app.task
    def add(left, right):
        note(f"add {left + right}")

    @app.task
    def slow(number, seconds):
        note(f"start {number}")
        time.sleep(seconds)
        note(f"slow {number}")

    @app.task
    def late(due):
        note(f"late {time.time() - due:.3f}")

    @app.task(bind=True)
    def own_eta(self):
        note(f"eta {self.request.eta}")

    @app.task(bind=True, max_retries=2, default_retry_delay=0.2)
    def flaky(self):
        note(f"flaky {self.request.retries}")
        if self.request.retries < 2:
            raise self.retry()
"""


class Site:
    """A folder with the app, its queues and the notes of its tasks."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.notes_file = folder / "notes"
        (folder / "celery_app.py").write_text(textwrap.dedent(APP))
        self.environment = {
            **os.environ,
            "BROKER": f"local://{folder}/queues.db",
            "NOTES": str(self.notes_file),
            "PYTHONPATH": os.pathsep.join([str(folder), str(Path(__file__).parents[2])]),
        }
        self.broker = LocalBroker(Database(str(folder / "queues.db")))
        self.processes: list[subprocess.Popen[bytes]] = []

    def worker(self, pool: str, *options: str, **extra: str) -> subprocess.Popen[bytes]:
        command = ["-m", "celery", "-A", "celery_app", "worker", "-c", "2", "-P", pool, *options]
        with (self.folder / "worker.log").open("ab") as log:
            process = subprocess.Popen(
                [sys.executable, *command],
                cwd=self.folder,
                env={**self.environment, **extra},
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
        self.processes.append(process)
        return process

    def send(self, code: str, seconds: float = 30.0) -> str:
        """Run code beside the app; returns what it prints."""
        done = subprocess.run(
            [sys.executable, "-c", f"from celery_app import *\n{code}"],
            env=self.environment,
            check=True,
            timeout=seconds,
            stdout=subprocess.PIPE,
            text=True,
        )
        return done.stdout

    def notes(self) -> list[str]:
        return self.notes_file.read_text().split("\n")[:-1] if self.notes_file.exists() else []

    def until(self, check, seconds=90.0):
        ends_at = time.monotonic() + seconds
        while not check():
            log = (self.folder / "worker.log").read_text()[-3000:]
            assert time.monotonic() < ends_at, f"not in time; {self.notes()}\n{log}"
            time.sleep(0.05)

    def end(self):
        for process in self.processes:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
            process.wait(10)

    def counts(self):
        stats = self.broker.stats("celery")
        return (stats.active, stats.leased, stats.scheduled, stats.dead)


@pytest.fixture
def site(tmp_path):
    site = Site(tmp_path)
    yield site
    site.end()


def test_a_celery_worker_runs_retries_and_renews_and_never_sees_garbage(site):
    site.broker.send("celery", [Envelope(b"\xc1garbage")])
    site.send(
        "for n in range(20): add.delay(n, 0)\n"
        "slow.delay(1, 4.0)\n"  # much longer than the lease
        "flaky.delay()\n"
        "add.apply_async((100, 0), countdown=10)"  # longer than the sender takes to end
    )
    assert site.counts()[2] == 1, "the countdown lies in the broker"
    site.worker("prefork")
    site.until(lambda: "slow 1" in site.notes() and "add 100" in site.notes())
    site.until(lambda: site.counts() == (0, 0, 0, 1))
    others = ["add 100", "start 1", "slow 1", "flaky 0", "flaky 1", "flaky 2"]
    assert sorted(site.notes()) == sorted([*(f"add {n}" for n in range(20)), *others])
    assert site.broker.peek("celery", dead_letter=True)[0].dead_letter_reason == "undecodable"


def test_a_celery_worker_that_is_killed_loses_nothing(site):
    site.send("for n in range(6): slow.delay(n, 1.0)")
    first = site.worker("threads")
    site.until(lambda: any(note.startswith("start") for note in site.notes()))
    os.killpg(first.pid, signal.SIGKILL)
    first.wait(10)
    assert site.counts()[1] > 0, "what it held is still leased"
    site.worker("threads")
    site.until(lambda: site.counts() == (0, 0, 0, 0))
    assert {note for note in site.notes() if note.startswith("slow")} == {
        f"slow {n}" for n in range(6)
    }


@pytest.mark.parametrize(("order", "urgent"), [("rabbitmq", 9), ("redis", 0)])
def test_a_worker_shares_its_time_between_priorities_and_a_kill_loses_nothing(site, order, urgent):
    site.environment["PRIORITY_ORDER"] = order
    site.send(
        f"for n in range(40): add.apply_async((n, 0), priority={9 - urgent})\n"
        f"for n in range(40): add.apply_async((1000 + n, 0), priority={urgent})\n"
        f"for n in range(3): slow.apply_async((n, 1.0), priority={urgent})"
    )
    first = site.worker("prefork")
    site.until(lambda: any(note.startswith("start") for note in site.notes()))
    os.killpg(first.pid, signal.SIGKILL)
    first.wait(10)
    begun = [note for note in site.notes() if note.startswith("add")][:40]
    assert 28 <= sum(int(note.split()[1]) >= 1000 for note in begun) <= 36, "about four of five"
    site.worker("prefork")
    site.until(lambda: len({each for each in site.notes() if not each.startswith("start")}) == 83)
    site.until(lambda: all(site.broker.stats(q).living == 0 for q in site.broker.queues()))
    names = {name for name in site.broker.queues() if name.startswith("celery")}
    assert names == {"celery", "celery-high", "celery-low"}


def test_a_sender_and_a_worker_go_on_to_the_next_url(site):
    (site.folder / "file").write_text("no directory")
    urls = ";".join(f"aztask+local://{site.folder}/{name}" for name in ("file/q.db", "queues.db"))
    module = site.folder / "celery_app.py"
    text = module.read_text().replace('"aztask://"', repr(urls))
    module.write_text(text.replace('"broker": os.environ["BROKER"], ', ""))
    site.send("add.delay(1, 2)")
    site.worker("threads")
    site.until(lambda: "add 3" in site.notes())


ETAS = """
import time
from datetime import datetime, timezone
for number in range(12):
    due = time.time() + 2 + number * 0.37
    late.apply_async((due,), eta=datetime.fromtimestamp(due, timezone.utc))
"""


def check_on_time(site) -> None:
    """Tasks with an eta never start before it, nor long after it.

    How long after it is measured by benchmarks/celery_on_time.py, on a quiet machine.
    """
    site.worker("prefork")
    site.send("add.delay(0, 0)")
    site.until(lambda: "add 0" in site.notes())
    site.send(ETAS)
    site.until(lambda: len(site.notes()) == 13)
    delays = sorted(float(note.split()[1]) for note in site.notes() if note.startswith("late"))
    assert delays[0] >= 0.0, delays
    assert delays[6] < 5.0, delays


def test_tasks_with_an_eta_start_at_their_time(site):
    check_on_time(site)


def test_a_task_knows_its_own_eta(site):
    site.worker("threads")
    eta = "2021-02-03T04:05:06+00:00"
    site.send(
        f"from datetime import datetime\nown_eta.apply_async(eta=datetime.fromisoformat('{eta}'))"
    )
    site.until(site.notes)
    assert site.notes() == [f"eta {eta}"]


REVOKED = """
app.control.revoke("never", terminate=True)
app.control.revoke_by_stamped_headers({"team": ["x"]})
add.apply_async((1, 0), task_id="never")
stamped = add.s(2, 0)
stamped.stamp(team="x")
stamped.delay()
add.delay(3, 0)
"""


def check_revoked_before_there_is_a_worker(site) -> None:
    """What is revoked while no worker runs is not run by one that starts later."""
    site.send(REVOKED)
    site.worker("prefork")
    site.until(lambda: site.notes() and not any(site.counts()))
    assert site.notes() == ["add 3"]


def test_what_is_revoked_before_there_is_a_worker(site):
    check_revoked_before_there_is_a_worker(site)


CONTROL = """
import json, threading, time
events, ready = [], threading.Event()

def listen():
    with app.connection() as connection:
        receiver = app.events.Receiver(connection, handlers={"*": events.append})
        ready.set()
        receiver.capture(limit=None, timeout=None, wakeup=True)

threading.Thread(target=listen, daemon=True).start()
ready.wait(10)
ends_at = time.monotonic() + 60

def until(check):
    while not check():
        assert time.monotonic() < ends_at, (check, [each["type"] for each in events])
        time.sleep(0.1)

inspect = app.control.inspect(timeout=SECONDS)
pong = None
while not pong:
    assert time.monotonic() < ends_at
    pong = inspect.ping()
(name,) = pong
until(lambda: events)  # the worker may remember for some seconds that nobody listened
first = slow.delay(1, 2.0)
until(lambda: any(each["type"] == "task-started" for each in events))
active = [each["id"] for each in inspect.active()[name]]
app.control.revoke("never", destination=[name])
revoked = inspect.revoked()[name]
limited = app.control.rate_limit("celery_app.add", "10/m", reply=True, timeout=SECONDS)
late = slow.apply_async((2, 60.0))
until(lambda: len(inspect.active()[name]) == 2 or any(
    each["type"] == "task-started" and each["uuid"] == late.id for each in events))
app.control.revoke(late.id, terminate=True)
until(lambda: any(each["type"] == "task-revoked" and each["uuid"] == late.id for each in events))
until(lambda: any(each["type"] == "worker-heartbeat" for each in events))
app.control.pool_grow(1, destination=[name])
processes = lambda: len(inspect.stats()[name]["pool"]["processes"])
until(lambda: processes() == 3)
app.control.shutdown()
print(json.dumps({
    "pong": pong[name], "active": first.id in active, "revoked": revoked,
    "limited": list(limited[0].values())[0],
}))
"""


BUSY = """
import time
for number in range(6):
    slow.delay(number, 5.0)
inspect, ends_at, active = app.control.inspect(timeout=3.0), time.monotonic() + 30, None
while not active or len(list(active.values())[0]) < 2:
    assert time.monotonic() < ends_at
    active = inspect.active()
answers = [inspect.ping() for _ in range(3)]  # the pool is full, and more tasks wait
print(sum(answer is not None for answer in answers))
app.control.purge()
app.control.shutdown()
"""


def test_a_worker_answers_while_its_pool_is_full(site):
    worker = site.worker("prefork")
    assert site.send(BUSY, 60).split() == ["3"]
    assert worker.wait(30) == 0


def check_remote_control(site, seconds: float) -> None:
    """Inspect, control, revoke, rate limits and events of a prefork worker."""
    worker = site.worker("prefork", "-E")
    out = json.loads(site.send(CONTROL.replace("SECONDS", str(seconds)), 90))
    assert out["pong"] == {"ok": "pong"}
    assert out["active"]
    assert out["revoked"] == ["never"]
    assert "new rate limit set successfully" in out["limited"]["ok"]
    assert worker.wait(20) == 0
    assert "slow 1" in site.notes()
    assert "slow 2" not in site.notes()


STRANGER = """
import os
from celery import Celery
from aztask.celery import transport

transport.register()
stranger = Celery("stranger", broker="aztask://")
stranger.conf.broker_transport_options = {"broker": os.environ["BROKER"]}
"""


def test_who_may_publish_stops_every_worker_but_those_that_refuse_it(site):
    """A stranger without the app. What such a command does is Celery's affair, and unsigned."""
    refusing = site.worker("prefork", "-l", "INFO", "-n", "refusing@%h", UNCONTROLLED="1")
    controlled = site.worker("prefork", "-l", "INFO", "-n", "controlled@%h")
    log = site.folder / "worker.log"
    site.until(lambda: log.read_text().count(" ready.") == 2)
    asked = STRANGER + "print(sorted(each.partition('@')[0] for each in "
    asked += "stranger.control.inspect(timeout=5.0).conf() or ()))"
    assert site.send(asked, 60).strip() == "['controlled']"
    site.send(STRANGER + "stranger.control.shutdown()", 60)
    assert controlled.wait(30) == 0
    site.send("add.delay(1, 2)")
    site.until(lambda: "add 3" in site.notes())
    assert refusing.poll() is None


def test_remote_control_and_events(site):
    check_remote_control(site, 1.0)
    assert site.broker.queues() == ["celery"]


SCHEDULED = """
import json, time
garbage = {"eta": "2999-01-01T00:00:00+00:00", "task": "celery_app.add", "id": "garbage"}
with app.producer_pool.acquire() as producer:
    producer.publish("no task", routing_key="celery", exchange="", headers=garbage)
stranger = app.send_task("of.another.app", countdown=600)
late = add.apply_async((1, 2), countdown=600)
inspect, ends_at = app.control.inspect(timeout=SECONDS), time.monotonic() + 60
while len(inspect.ping() or ()) < 2:
    assert time.monotonic() < ends_at
soon = add.apply_async((1, 1), countdown=6)
print(json.dumps({"soon": soon.id, "late": late.id, "found": list(inspect.scheduled().values())}))
"""


def check_scheduled(site, seconds: float, *, shown: bool) -> None:
    """Both workers list what waits in the broker, if it shows that; it still runs once."""
    for name in ("one", "two"):
        site.worker("prefork", "-n", f"{name}@%h")
    out = json.loads(site.send(SCHEDULED.replace("SECONDS", str(seconds)), 90))
    assert len(out["found"]) == 2
    for found in out["found"]:
        tasks = {each["request"]["id"]: each for each in found}
        assert set(tasks) == ({out["soon"], out["late"]} if shown else set())
        if shown:
            task = tasks[out["late"]]
            left = datetime.fromisoformat(task["eta"]).timestamp() - time.time()
            assert 500 < left < 600
            assert task["request"]["args"] == [1, 2]
            assert task["request"]["name"] == "celery_app.add"
            assert task["request"]["time_start"] is None
    site.until(site.notes)
    time.sleep(1)
    assert site.notes() == ["add 2"]


def test_inspect_scheduled_lists_what_waits_in_the_broker(site):
    check_scheduled(site, 3.0, shown=True)
