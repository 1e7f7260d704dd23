"""Celery's pools on every broker, beside Redis: what they keep there, they keep on ours.

Redis is the reference: the same scenarios run there where `redis-server` is installed.
"""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import shutil
import signal
import subprocess
import sys
import textwrap
import time
from collections import Counter
from collections.abc import Callable, Iterator
from functools import partial
from itertools import count
from pathlib import Path

import pytest
from azurite import Azurite
from bus import address_at
from proxy import proxied

from aztask.queues.servicebus.admin import ADMIN_VARIABLE
from aztask.testing import RunningEmulator
from tests.celerysuite.redis import redis_server

ROOT = Path(__file__).parents[2]
REDIS = shutil.which("redis-server") and importlib.util.find_spec("redis")

APP = """
    import decimal, json, os, time
    from celery import Celery, signals
    from celery.worker.request import Request

    app = Celery("pools_app", broker=os.environ["BROKER_URL"])
    app.conf.update(
        broker_transport_options=json.loads(os.environ["OPTIONS"]),
        task_default_queue=os.environ["QUEUE"],
        task_acks_late=os.environ["ACKS"] == "late",
        task_reject_on_worker_lost=True,
        task_ignore_result=True,
        worker_prefetch_multiplier=1,
        worker_proc_alive_timeout=30,
        broker_connection_retry_on_startup=True,
        **json.loads(os.environ["SETTINGS"]),
    )

    def note(line):
        with open("notes", "a") as file:
            file.write(line + chr(10))

    @signals.worker_ready.connect
    def ready(sender, **_):
        note("loop " + sender.loop.__name__)

    class NotedRequest(Request):
        def on_accepted(self, *arguments):
            super().on_accepted(*arguments)
            note("accepted")

    @app.task(Request=NotedRequest)
    def work(number, seconds):
        note(f"start {number}")
        time.sleep(seconds)
        note(f"end {number}")

    @app.task
    def victim():
        again = os.path.exists("victim")
        with open("victim", "w") as file:
            file.write(str(os.getpid()))
        time.sleep(0 if again else 120)
        note("end victim")

    @app.task
    def traffic(number):
        note(f"traffic {number}")
        if not os.path.exists("quiet"):
            traffic.delay(number + 1)

    @app.task
    def typed(value):
        note(f"typed {type(value).__name__} {value}")
"""

_numbers = count(1)


class Site:
    """A folder with the app, where its workers run; one queue of one broker."""

    def __init__(self, folder: Path, url: str, options: dict[str, object], acks: str) -> None:
        self.folder = folder
        (folder / "pools_app.py").write_text(textwrap.dedent(APP))
        self.queue = f"pools{next(_numbers)}-{os.getpid()}"
        self.environment = {
            **os.environ,
            "BROKER_URL": url,
            "OPTIONS": json.dumps(options),
            "SETTINGS": "{}",
            "QUEUE": self.queue,
            "ACKS": acks,
            "C_FORCE_ROOT": "1",  # Celery refuses to run a worker as root that accepts pickle
            "PYTHONPATH": os.pathsep.join([str(folder), str(ROOT)]),
        }
        self.processes: list[subprocess.Popen[bytes]] = []

    def worker(self, *options: str) -> subprocess.Popen[bytes]:
        command = ["-m", "celery", "-A", "pools_app", "worker", "-c", "2", "-l", "INFO", *options]
        with (self.folder / "log").open("ab") as log:
            process = subprocess.Popen(
                [sys.executable, *command],
                cwd=self.folder,
                env=self.environment,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
        self.processes.append(process)
        return process

    def send(self, code: str) -> None:
        program = [sys.executable, "-c", f"from pools_app import *\n{code}"]
        subprocess.run(program, cwd=self.folder, env=self.environment, check=True, timeout=60)

    def notes(self) -> list[str]:
        file = self.folder / "notes"
        return file.read_text().split("\n")[:-1] if file.exists() else []

    def log(self) -> str:
        return (self.folder / "log").read_text()

    def busy(self, names: list[str]) -> bool:
        """True if these tasks have started and the worker's main process has noticed it.

        A signal that comes in between makes Celery's prefork pool forget them, also on Redis: it
        waits until `worker_proc_alive_timeout` ends, and runs them again.
        """
        notes = self.notes()
        started = sum(note.startswith("start") for note in notes)
        accepted = notes.count("accepted")
        return {f"start {name}" for name in names} <= set(notes) and accepted >= started

    def until(self, check: Callable[[], object], seconds: float = 90.0) -> None:
        ends_at = time.monotonic() + seconds
        while not check():
            assert time.monotonic() < ends_at, f"not in time; {self.notes()}\n{self.log()[-4000:]}"
            time.sleep(0.05)

    def end(self) -> None:
        for process in self.processes:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait(10)


@pytest.fixture(scope="module")
def redis(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    if not REDIS:
        pytest.skip("needs redis-server (apt-get install redis-server) and tox -e celery-redis")
    with redis_server(tmp_path_factory.mktemp("redis")) as port:
        yield f"redis://127.0.0.1:{port}/0"


BROKERS = ["local", "servicebus", "storagequeue", "redis"]
OURS = BROKERS[:3]


@pytest.fixture
def site_on(
    request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Callable[..., Site]]:
    """A function (broker, "early" or "late") that makes a site."""
    made: list[Site] = []

    def make(broker: str, acks: str = "late") -> Site:
        if broker == "redis":
            url, options = request.getfixturevalue("redis"), {}
        elif broker == "local":
            url, options = f"aztask+local://{tmp_path}/queues.db", {}
        elif broker == "servicebus":
            bus: RunningEmulator = request.getfixturevalue("bus")
            url, options = "aztask://", {"broker": bus.connection_string}
            monkeypatch.setenv(ADMIN_VARIABLE, bus.admin_connection_string)
        else:
            azurite: Azurite = request.getfixturevalue("azurite")
            url, options = "aztask://", {"broker": azurite.connection_string}
        made.append(Site(tmp_path, url, options, acks))
        return made[-1]

    yield make
    for site in made:
        site.end()


def check_all_ended_once(site: Site, names: list[str]) -> None:
    """A second worker runs what is left; each task ends once, and none started more often."""
    site.worker("-P", "threads")
    site.until(lambda: {f"end {name}" for name in names} <= set(site.notes()))
    found = Counter(note for note in site.notes() if note.startswith(("start", "end")))
    wanted = Counter([f"{what} {name}" for name in names for what in ("start", "end")])
    assert found == wanted, site.log()


@pytest.mark.parametrize("acks", ["early", "late"])
@pytest.mark.parametrize("broker", BROKERS)
def test_a_warm_shutdown_waits_for_tasks_while_children_are_replaced(site_on, broker, acks):
    site = site_on(broker, acks)
    site.send(
        "for n in range(6): work.delay(n, 0.1)\n"
        "for n in (10, 11): work.delay(n, 5.0)\n"
        "for n in range(20, 23): work.delay(n, 0.1)\n"
    )
    first = site.worker("-P", "prefork", "--max-tasks-per-child", "1")
    site.until(lambda: site.busy(["10", "11"]))
    first.send_signal(signal.SIGTERM)
    assert first.wait(60) == 0, site.log()
    assert "loop asynloop" in site.notes()
    started = {each.split()[1] for each in site.notes() if each.startswith("start")}
    ended = {each.split()[1] for each in site.notes() if each.startswith("end")}
    assert started == ended, site.log()
    check_all_ended_once(site, [*map(str, range(6)), "10", "11", "20", "21", "22"])


@pytest.mark.parametrize("acks", ["early", "late"])
@pytest.mark.parametrize("broker", BROKERS)
def test_a_child_that_is_killed_while_others_are_replaced_is_noticed(site_on, broker, acks):
    site = site_on(broker, acks)
    site.worker("-P", "prefork", "--max-tasks-per-child", "1")
    site.send("victim.delay(); traffic.delay(0)")
    file = site.folder / "victim"
    site.until(lambda: file.exists() and file.read_text() and "traffic 1" in site.notes())
    os.kill(int(file.read_text()), signal.SIGKILL)
    # The traffic goes on: what is noticed only when it ends is noticed too late.
    site.until(lambda: "WorkerLostError" in site.log() or "end victim" in site.notes(), 60)
    if acks == "late":
        site.until(lambda: "end victim" in site.notes(), 60)
    traffic = len(site.notes())
    site.until(lambda: len(site.notes()) > traffic)
    (site.folder / "quiet").touch()


@pytest.mark.parametrize("pool", ["prefork", "threads", "solo"])
@pytest.mark.parametrize("acks", ["early", "late"])
@pytest.mark.parametrize("broker", BROKERS)
def test_a_warm_shutdown_of_each_pool_ends_what_runs_and_leaves_the_rest(
    site_on, broker, acks, pool
):
    site = site_on(broker, acks)
    site.send("for n in range(5): work.delay(n, 2.0)")
    first = site.worker("-P", pool)
    busy = 1 if pool == "solo" else 2
    site.until(lambda: site.notes().count("accepted") >= busy and site.busy([]))
    first.send_signal(signal.SIGTERM)
    assert first.wait(60) == 0, site.log()
    assert "loop asynloop" in site.notes()
    check_all_ended_once(site, [*map(str, range(5))])


PICKLE = '{"task_serializer": "pickle", "accept_content": ["json", "pickle"]}'


@pytest.mark.parametrize("broker", BROKERS)
def test_the_app_chooses_its_serializer_and_what_it_refuses_is_logged(site_on, broker):
    site = site_on(broker)
    site.environment["SETTINGS"] = PICKLE
    site.send("typed.delay(decimal.Decimal('1.5'))")
    first = site.worker("-P", "prefork")
    site.until(lambda: "typed Decimal 1.5" in site.notes())
    first.send_signal(signal.SIGTERM)
    assert first.wait(60) == 0
    site.send("typed.delay(decimal.Decimal('2.5'))\ntyped.apply_async(('x',), serializer='json')")
    site.environment["SETTINGS"] = "{}"  # this worker accepts JSON only
    site.worker("-P", "threads")
    site.until(lambda: "typed str x" in site.notes())
    refusal = "ContentDisallowed" if broker == "redis" else "is not delivered but dead-lettered"
    site.until(lambda: refusal in site.log())
    assert "typed Decimal 2.5" not in site.notes()


@pytest.mark.parametrize("broker", ["servicebus", "storagequeue"])
def test_the_loop_notices_an_outage_and_connects_again(site_on, broker, request):
    """Nothing is lost, and the worker is in its loop again."""
    site = site_on(broker)
    if broker == "servicebus":
        bus = request.getfixturevalue("bus")
        target, address = bus.port, partial(address_at, bus)
    else:
        azurite = request.getfixturevalue("azurite")
        target, address = azurite.port, azurite.connection_string_at
    with proxied(target) as proxy:
        direct = site.environment["OPTIONS"]
        site.environment["OPTIONS"] = json.dumps({"broker": address(proxy.port)})
        worker = site.worker("-P", "prefork")
        site.environment["OPTIONS"] = direct
        site.send("work.delay(0, 0.1)")
        site.until(lambda: "end 0" in site.notes())
        proxy.set("reset")
        site.until(lambda: "connection to broker lost" in site.log().lower())
        site.send("work.delay(1, 0.1)")
        proxy.set("pass")
        site.until(lambda: "end 1" in site.notes())
        worker.send_signal(signal.SIGTERM)
        assert worker.wait(60) == 0, site.log()
