"""Celery and aztask workers in one folder, which are killed at random and replaced.

The workers run the tasks of one module, which notes in a file what has ended (`note`). The module
gets its settings as environment variables: PLACE, the folder, and KIND, the kind of its worker.
"""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

HERE = Path(__file__).parent
ROOT = HERE.parents[1]


def seed_of_run() -> int:
    """The seed of the random kills: FLEET_SEED, printed so that a failure can be repeated."""
    seed = int(os.environ.get("FLEET_SEED", "24"))
    print(f"FLEET_SEED={seed}")
    return seed


def note(*words: object) -> None:
    """Append one line; short lines of several processes do not mix. Each run takes a moment."""
    time.sleep(0.05)
    line = " ".join([os.environ.get("KIND", "sender"), *map(str, words)]) + "\n"
    file = os.open(f"{os.environ['PLACE']}/notes", os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    os.write(file, line.encode())
    os.close(file)


class Workers:
    """Workers of several kinds in one folder, each with its processes in a session of its own."""

    def __init__(self, folder: Path, draw: random.Random) -> None:
        self.folder = folder
        self.draw = draw
        self.workers: list[tuple[str, subprocess.Popen[bytes]]] = []
        self.killed_at: dict[int, float] = {}

    def run(self, kind: str, command: Sequence[str], environment: Mapping[str, str]) -> None:
        """Start a worker. command: what follows ``python -m``."""
        with (self.folder / f"{kind}.log").open("ab") as log:
            worker = subprocess.Popen(
                [sys.executable, "-m", *command, "-c", "2"],
                cwd=self.folder,
                env=environment,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
        self.workers.append((kind, worker))

    def killed(self) -> str:
        """Kill a worker that the dice choose, with all its processes; returns its kind."""
        kind, worker = self.workers.pop(self.draw.randrange(len(self.workers)))
        assert worker.poll() is None, (self.folder / f"{kind}.log").read_text()[-2000:]
        os.killpg(worker.pid, signal.SIGKILL)
        worker.wait(10)
        self.killed_at[worker.pid] = time.time()
        return kind

    def notes(self) -> list[list[str]]:
        """The words of each note so far: the kind of the worker, then what the task noted."""
        file = self.folder / "notes"
        return [line.split() for line in file.read_text().splitlines()] if file.exists() else []

    def close(self) -> None:
        """Kill the workers."""
        for _, worker in self.workers:
            if worker.poll() is None:
                os.killpg(worker.pid, signal.SIGKILL)
            worker.wait(10)


class Releases(Workers):
    """Workers of two releases of aztask, of one app in this folder."""

    def __init__(
        self, folder: Path, app: str, packages: Mapping[str, Path], variables: Mapping[str, str]
    ) -> None:
        """packages: where each release is. variables: of the workers, besides PLACE and KIND."""
        super().__init__(folder, random.Random(seed_of_run()))
        self._app = app
        self._packages = packages
        self.variables = {"PLACE": str(folder), **variables}

    def environment(self, release: str) -> dict[str, str]:
        """All variables of a process of this release."""
        package = self._packages[release]
        return {
            **os.environ,
            **self.variables,
            "PYTHONPATH": os.pathsep.join([str(HERE), str(package)]),
            "FLEET_PACKAGE": str(package / "aztask"),
            "KIND": release,
        }

    def start(self, release: str) -> None:
        """Start a worker of this release."""
        self.run(release, ["aztask", "worker", "-A", self._app], self.environment(release))


class Fleet(Workers):
    """Workers of both kinds in one folder."""

    def __init__(
        self, folder: Path, module: str, draw: random.Random, environment: Mapping[str, str]
    ) -> None:
        """module: of this folder; it has the apps `celery` and `app`, both on the queue celery.

        environment: further variables for workers and senders.
        """
        super().__init__(folder, draw)
        self._module = module
        self.environment = {
            **os.environ,
            "PLACE": str(folder),
            "PYTHONPATH": os.pathsep.join([str(HERE), str(ROOT)]),
            **environment,
        }

    def send(self, code: str, environment: Mapping[str, str] | None = None) -> None:
        """Run code in a process of its own. environment: instead of that of the workers."""
        sent = subprocess.run(
            [sys.executable, "-c", code], env=environment or self.environment, cwd=self.folder,
            timeout=120, check=False, capture_output=True, text=True,
        )  # fmt: skip
        assert sent.returncode == 0, sent.stderr

    def start(self, kind: str) -> None:
        """Start a worker. kind: celery or aztask."""
        command = {
            "celery": ["celery", "-A", f"{self._module}:celery", "worker", "-P", "prefork"],
            "aztask": ["aztask", "worker", "-A", f"{self._module}:app", "-Q", "celery"],
        }[kind]
        self.run(kind, command, {**self.environment, "KIND": kind})

    def kill_one(self) -> None:
        """Kill a worker; another of its kind takes its place."""
        self.start(self.killed())
