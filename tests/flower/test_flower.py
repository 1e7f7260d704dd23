"""Flower, from PyPI, shows the workers and tasks of a Celery app on aztask, and revokes a task.

Run by ``tox -e flower``, on a local file, on Service Bus (our emulator) and on Storage queues
(Azurite). A worker with two processes runs the tasks.
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import azurite
import emulatorprocess
import pytest
from browser import opened

pytest.importorskip("flower")

APP = """
import time
from celery import Celery

app = Celery("shop", broker="aztask://")  # the address is in AZTASK_BROKER
app.conf.update(task_acks_late=True, task_ignore_result=True)

@app.task(name="shop.sleep")
def sleep(seconds):
    time.sleep(seconds)
"""
SECONDS = 90.0


class Site:
    """A folder with the app, and the processes that were started in it."""

    def __init__(self, folder: Path, broker: Mapping[str, str]) -> None:
        """broker: the environment variables that name the broker."""
        self.folder = folder
        (folder / "shop.py").write_text(APP)
        self.environment = {
            **os.environ,
            **broker,
            "PYTHONPATH": str(folder),
            "FLOWER_UNAUTHENTICATED_API": "true",  # its page sends the revocation to its API
        }
        self.processes: list[subprocess.Popen[bytes]] = []
        with socket.create_server(("127.0.0.1", 0)) as free:
            self.port = free.getsockname()[1]

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def start(self, *arguments: str) -> None:
        with (self.folder / f"{arguments[0]}.log").open("wb") as log:
            self.processes.append(
                subprocess.Popen(
                    [sys.executable, "-m", "celery", "-A", "shop", *arguments],
                    cwd=self.folder,
                    env=self.environment,
                    stdout=log,
                    stderr=log,
                    start_new_session=True,
                )
            )

    def send(self, seconds: float) -> str:
        """Send a task; returns its id."""
        code = f"import shop; print(shop.sleep.delay({seconds}).id)"
        done = subprocess.run(
            [sys.executable, "-c", code],
            cwd=self.folder,
            env=self.environment,
            capture_output=True,
            text=True,
            check=True,
            timeout=SECONDS,
        )
        return done.stdout.strip()

    def end(self) -> None:
        for process in self.processes:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
            process.wait(10)


def until(check) -> None:
    ends_at = time.monotonic() + SECONDS
    while not check():
        assert time.monotonic() < ends_at, "it did not happen in time"
        time.sleep(0.2)


def answers(url: str) -> bool:
    try:
        urllib.request.urlopen(url, timeout=2).close()
    except OSError:
        return False
    return True


@contextmanager
def broker(name: str, folder: Path) -> Iterator[dict[str, str]]:
    """A running broker, as the environment variables that name it."""
    if name == "servicebus":
        with emulatorprocess.running() as ready:
            yield {
                "AZTASK_BROKER": ready["connection_string"],
                "AZTASK_SERVICEBUS_ADMIN": ready["admin_connection_string"],
            }
    elif name == "storagequeue":
        with azurite.running(folder / "azurite") as server:
            yield {"AZTASK_BROKER": server.connection_string}
    else:
        yield {"AZTASK_BROKER": f"local://{folder}/queues.db"}


@pytest.fixture(params=["local", "servicebus", "storagequeue"])
def site(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Site]:
    with broker(request.param, tmp_path) as variables:
        site = Site(tmp_path, variables)
        try:
            site.start("worker", "-c", "2", "-E", "-n", "flower-worker@test")
            site.start("flower", "--address=127.0.0.1", f"--port={site.port}")
            until(lambda: answers(f"{site.url}/workers"))
            yield site
        finally:
            site.end()


def test_flower_shows_workers_and_tasks_and_revokes_one(site: Site) -> None:
    with opened(f"{site.url}/workers") as page:

        def text(path: str) -> str:
            page.goto(f"{site.url}{path}")
            page.wait_for_timeout(500)
            return "".join(page.inner_text("body").split())  # names are broken into lines

        until(lambda: "flower-worker@test" in (shown := text("/workers")) and "Online" in shown)
        short, long = site.send(0.1), site.send(300)
        until(lambda: "SUCCESS" in text(f"/task/{short}"))
        until(lambda: "STARTED" in text(f"/task/{long}"))
        assert "shop.sleep" in text("/tasks")
        page.goto(f"{site.url}/task/{long}")
        page.on("dialog", lambda dialog: dialog.accept())
        page.click("#task-terminate")
        until(lambda: "REVOKED" in text(f"/task/{long}"))
