"""A Celery app whose beats run side by side, of two versions of its code, and are killed at random.

The store's queue drops a second message of an id, so every message of it is one occurrence.
"""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from aztask.queues.base import QueueOptions
from aztask.queues.engine import Database
from aztask.queues.local.broker import LocalBroker

ROOT = Path(__file__).parents[2]
EVERY = 2
APP = """
    import os, time
    from celery import Celery
    from celery.beat import BeatLazyFunc

    from aztask.schedules import runner

    runner.STAGGER = (0.1, 0.7)
    runner.START_SECONDS = 0.1
    runner.RESEND_SECONDS = 2.0

    app = Celery("shop", broker="aztask+local://" + os.environ["QUEUES"])
    app.conf.beat_scheduler = "aztask.celery:Scheduler"
    if "NO_BACKEND" not in os.environ:
        app.conf.result_backend = "aztask+local://" + os.environ["RESULTS"]
    else:
        app.conf.beat_schedule_filename = "aztask+local://" + os.environ["RESULTS"]
    app.conf.result_expires = None
    app.conf.task_acks_late = True

    VERSION = int(os.environ.get("VERSION", "1"))

    def entry(*args, **kwargs):
        options = {"expires": 600}
        return {"task": "shop.tick", "schedule": 2.0, "args": args, "kwargs": kwargs,
                "options": options}

    app.conf.beat_schedule = {f"all {n}": entry(n) for n in range(4)}
    app.conf.beat_schedule["changed"] = entry("version", VERSION)
    app.conf.beat_schedule["lazy"] = entry(now=BeatLazyFunc(time.time))
    app.conf.beat_schedule["old" if VERSION == 1 else "new"] = entry()

    @app.task(name="shop.tick", bind=True)
    def tick(self, *args, **kwargs):
        with open(os.environ["NOTES"], "a") as file:
            file.write(self.request.id + chr(10))
"""


class BeatSite:
    """A folder with the app, its queues and its results, and the beats that run there."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.notes = folder / "notes"
        (folder / "beat_app.py").write_text(textwrap.dedent(APP))
        self.broker = LocalBroker(Database(str(folder / "queues.db")))
        self.broker.declare("celery", QueueOptions(lease=60, duplicate_window=3600))
        self.beats: list[subprocess.Popen[bytes]] = []

    def start(self, *words: str, package: Path = ROOT, **extra: str) -> subprocess.Popen[bytes]:
        """Start ``celery -A beat_app WORDS``, with aztask from a folder."""
        environment = {
            **os.environ,
            "QUEUES": f"{self.folder}/queues.db",
            "RESULTS": f"{self.folder}/results.db",
            "NOTES": str(self.notes),
            "PYTHONPATH": os.pathsep.join([str(self.folder), str(package)]),
            **extra,
        }
        number = len(self.beats)
        with (self.folder / f"log-{number}").open("wb") as log:
            process = subprocess.Popen(
                [sys.executable, "-m", "celery", "-A", "beat_app", *words],
                cwd=self.folder,
                env=environment,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
        self.beats.append(process)
        return process

    def beat(self, version: int, **options: Any) -> subprocess.Popen[bytes]:
        """Start a beat with one of the two versions of the code."""
        return self.start("beat", "-l", "info", VERSION=str(version), **options)

    def end(self) -> None:
        """Kill what runs."""
        for each in self.beats:
            if each.poll() is None:
                os.killpg(each.pid, signal.SIGKILL)
            each.wait()

    def log(self, process: subprocess.Popen[bytes]) -> str:
        """What a process wrote."""
        return (self.folder / f"log-{self.beats.index(process)}").read_text(errors="replace")

    def started(self, process: subprocess.Popen[bytes]) -> bool:
        """Whether a beat has said that it starts."""
        return "beat: Starting" in self.log(process)

    def until(self, check: Any, seconds: float = 60.0) -> None:
        """Wait until `check` is true."""
        ends = time.monotonic() + seconds
        while not check():
            assert time.monotonic() < ends, "\n".join(self.log(each)[-2000:] for each in self.beats)
            time.sleep(0.1)

    def waiting(self) -> int:
        """How many messages are in the queue."""
        return self.broker.stats("celery").living

    def received(self) -> Iterator[tuple[str, int, dict[str, Any]]]:
        """(the entry, the time of its occurrence, its message's headers and body), of each."""
        receiver = self.broker.receiver("celery", lease=60)
        while found := receiver.receive(32, 0.0):
            for each in found:
                headers = dict(each.envelope.headers)
                body = json.loads(each.envelope.body)
                name, _, _ = headers["id"].rpartition("@")
                more = {**headers, "args": body[0], "kwargs": body[1]}
                yield name, int(headers["aztask-scheduled-at"]), more
        receiver.close()


def kill_at_random(site: BeatSite, dice: random.Random, kills: int, old: Path = ROOT) -> None:
    """Run three beats of two versions and kill so many of them; at least two always run.

    * `old`: where the first version's aztask is.
    """

    def begin() -> subprocess.Popen[bytes]:
        version = dice.choice((1, 2))
        return site.beat(version, package=old if version == 1 else ROOT)

    living = [site.beat(1, package=old)]
    site.until(lambda: site.waiting() >= 7)
    living += [site.beat(2), begin()]
    for _ in range(kills):
        site.until(lambda: all(map(site.started, living)))
        time.sleep(dice.uniform(0.5, 2.0))
        victim = living.pop(dice.randrange(len(living)))
        os.killpg(victim.pid, signal.SIGKILL)
        victim.wait()
        living.append(begin())
    site.until(lambda: all(map(site.started, living)))
    time.sleep(EVERY + 2)


def check_each_once(site: BeatSite) -> None:
    """Every occurrence from the first to the last one of each entry was sent exactly once.

    The entry `changed` has the arguments of either version.
    """
    site.end()
    found: dict[str, list[int]] = {}
    versions = set()
    for name, at, more in site.received():
        found.setdefault(name, []).append(at)
        assert more["celery_beat_task"] is True
        if name == "lazy":
            assert abs(more["kwargs"]["now"] - at) < 30
        if name == "changed":
            versions.add(more["args"][1])
    assert set(found) == {*(f"all {n}" for n in range(4)), "changed", "lazy", "new", "old"}
    assert versions == {1, 2}
    for name, times in found.items():
        expected = list(range(min(times), max(times) + 1, EVERY))
        assert sorted(times) == expected, name
