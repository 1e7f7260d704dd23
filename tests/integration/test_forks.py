"""A process forks beside threads that send, on every broker: each child works, and nothing is lost.

With `multiprocessing`, gunicorn and uWSGI: the last two fork what was loaded before.
"""

from __future__ import annotations

import json
import shutil
import signal
import socket
import subprocess
import sys
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from azurite import Azurite
from bus import bus_site
from harness import Site, site_in, wait_until
from storage import storage_site

from aztask.queues.base import QueueOptions
from aztask.testing import RunningEmulator

pytestmark = [pytest.mark.services, pytest.mark.timeout(600)]
SCRIPTS = Path(sys.executable).parent
REQUESTS = 12


@pytest.fixture(params=["local", "Storage queue", "Service Bus"])
def site(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Site]:
    azurite: Callable[[], Azurite] = lambda: request.getfixturevalue("azurite")  # noqa: E731
    bus: Callable[[], RunningEmulator] = lambda: request.getfixturevalue("bus")  # noqa: E731
    if request.param == "local":
        made = site_in(tmp_path / "site")
    elif request.param == "Storage queue":
        made = storage_site(tmp_path / "site", azurite())
    else:
        made = bus_site(tmp_path / "site", bus(), QueueOptions(lease=30.0))
    with made as opened:
        yield opened


def waiting(site: Site) -> int:
    stats = site.app().broker.stats("default")
    return stats.active or stats.total or 0


def test_children_of_a_process_whose_threads_send(site: Site) -> None:
    children = 25 if site.broker.startswith("local") else 4
    site.app().broker.declare("default")
    done = subprocess.run(
        [sys.executable, "-m", "forking_app", str(children)],
        env=site.environment,
        cwd=site.folder,
        capture_output=True,
        text=True,
        timeout=500,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    assert report["ends"] == [0] * (children + 1), done.stderr
    wait_until(lambda: waiting(site) == report["sent"], 30, "everything that was sent is there")


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


def gunicorn(port: int) -> list[str]:
    program = str(SCRIPTS / "gunicorn")
    flags = ["--preload", "--workers", "3", "--graceful-timeout", "5", "--log-level", "error"]
    return [program, *flags, "--bind", f"127.0.0.1:{port}", "forking_app:application"]


def uwsgi(port: int) -> list[str]:
    """uWSGI forks in C: without its option for threads it does not tell Python about it."""
    return [
        *(str(SCRIPTS / "uwsgi"), "--http-socket", f"127.0.0.1:{port}", "--module"),
        *("forking_app:application", "--master", "--processes", "3", "--die-on-term"),
        *("--disable-logging", "--home", sys.prefix),
    ]


SERVERS = {
    "gunicorn": (gunicorn, "threads"),
    "uwsgi": (uwsgi, "sent"),
    "uwsgi with threads": (lambda port: [*uwsgi(port), "--enable-threads"], "sent"),
}


@pytest.mark.parametrize(
    "server",
    [pytest.param(name, marks=pytest.mark.uwsgi if "uwsgi" in name else ()) for name in SERVERS],
)
def test_workers_of_a_web_server_that_preloads_the_application(site: Site, server: str) -> None:
    make, preload = SERVERS[server]
    port = free_port()
    command = make(port)
    if shutil.which(command[0]) is None:
        name = Path(command[0]).name
        pytest.fail(f"install {name} (pip install {name}), or run tox -e uwsgi", pytrace=False)
    site.app().broker.declare("default")
    environment = {**site.environment, "FORKING_PRELOAD": preload}
    with (site.folder / "log").open("wb") as log:
        running = subprocess.Popen(
            command, env=environment, cwd=site.folder, stdout=log, stderr=subprocess.STDOUT
        )
    try:
        pids, ids = set(), set()

        def answered() -> bool:
            try:
                with urllib.request.urlopen(f"http://127.0.0.1:{port}/", timeout=60) as answer:
                    pid, task_id = answer.read().decode().split()
            except OSError:  # it has just started
                return False
            pids.add(pid)
            ids.add(task_id)
            return len(ids) >= REQUESTS

        wait_until(answered, 120, "the workers answer")
    finally:
        running.send_signal(signal.SIGTERM)
        running.wait(60)
    text = (site.folder / "log").read_text()
    assert str(running.pid) not in pids, text
    worker = site.worker("-Q", "default", "--pool", "threads", "-c", "8", "--lease", "30s")
    app = site.app()
    wait_until(lambda: all(app.result(each).ready() for each in ids), 60, f"all ran: {text}")
    assert worker.stop() == 0, worker.log
