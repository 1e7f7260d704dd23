"""The systems that `storagequeue.py` compares: how to send to each, and start its worker."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
import venv
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from azure.core.exceptions import ResourceExistsError
from azure.storage.queue import QueueServiceClient

HERE = Path(__file__).parent
PEERS = HERE / "peers"
VENV = Path(os.environ.get("BENCH_PEERS", HERE.parent / ".tox" / "bench-peers"))


def peers_python() -> str:
    """The Python of the peers' own environment, which is created if it is missing."""
    python = VENV / "bin" / "python"
    if not python.exists():
        venv.create(VENV, with_pip=True)
        subprocess.run(
            [python, "-m", "pip", "install", "-q", "-r", str(PEERS / "requirements.txt")],
            check=True,
            capture_output=True,
        )
    return str(python)


@dataclass(frozen=True)
class System:
    """One task queue system. module: in `peers/`. queue: its name on the service."""

    name: str
    module: str
    queue: str
    python: str
    arguments: Sequence[str]
    kill_arguments: Sequence[str] = ()


def systems() -> list[System]:
    """All compared systems, aztask first."""
    peers = peers_python()
    ours = ("-m", "aztask", "worker", "-A", "aztask_app", "-Q", "default", "-c", "8")
    return [
        System(
            "aztask",
            "aztask_app",
            "default",
            sys.executable,
            (*ours, "--pool", "threads"),
            ("--lease", "3s"),
        ),
        System(
            "celery threads",
            "celery_app",
            "celery-bench",
            peers,
            (
                "-m",
                "celery",
                "-A",
                "celery_app",
                "worker",
                "-P",
                "threads",
                "-c",
                "8",
                "-l",
                "ERROR",
            ),
        ),
        System(
            "celery solo",
            "celery_app",
            "celery-bench",
            peers,
            ("-m", "celery", "-A", "celery_app", "worker", "-P", "solo", "-l", "ERROR"),
        ),
        System(
            "dramatiq",
            "dramatiq_app",
            "dramatiq-bench",
            peers,
            ("-m", "dramatiq", "dramatiq_app", "-p", "1", "-t", "8"),
        ),
    ]


class Bench:
    """One storage account: its endpoint, and a folder for marks and logs."""

    def __init__(
        self, folder: Path, endpoint: str, connection: str, account: str, key: str
    ) -> None:
        folder.mkdir()
        self.folder = folder
        self.marks = self.folder / "marks"
        self.service = QueueServiceClient.from_connection_string(connection, retry_total=0)
        self.environment = {
            **os.environ,
            "BENCH_CONNECTION": connection,
            "BENCH_ENDPOINT": endpoint,
            "BENCH_KEY": key,
            "BENCH_MARKS": str(self.marks),
            "AZURE_STORAGE_CONNECTION_STR": connection,
            "AZURE_STORAGE_ACCOUNT_NAME": account,
            "PYTHONPATH": os.pathsep.join([str(PEERS), str(HERE.parent)]),
        }

    def fresh(self, *names: str) -> None:
        """Create the queues, or empty them, and remove all marks."""
        for name in names:
            client = self.service.get_queue_client(name)
            with suppress(ResourceExistsError):
                client.create_queue()
            client.clear_messages()
        self.marks.unlink(missing_ok=True)

    def depth(self, queue: str) -> int:
        """The approximate number of messages in a queue."""
        properties = self.service.get_queue_client(queue).get_queue_properties()
        return int(properties.approximate_message_count or 0)

    def call(self, system: System, expression: str, warm: str = "m.send(3)") -> float:
        """Run `expression` with the system's module in its Python; returns its seconds there.

        warm: runs before it, so that connections are open.
        """
        code = (
            f"import time, {system.module} as m; {warm}; b = time.perf_counter(); "
            f"{expression}; print(time.perf_counter() - b)"
        )
        done = subprocess.run(
            [system.python, "-c", code],
            env=self.environment,
            stdout=subprocess.PIPE,
            stderr=(self.folder / f"{system.name}.log").open("ab"),
            check=True,
            timeout=120,
        )
        return float(done.stdout.split()[-1])

    @contextmanager
    def worker(self, system: System, *more: str) -> Iterator[subprocess.Popen[bytes]]:
        """Yield a running worker, and stop it at the end."""
        process = self.start(system, *more)
        try:
            yield process
        finally:
            process.send_signal(signal.SIGTERM)
            try:
                process.wait(20)
            except subprocess.TimeoutExpired:
                kill_group(process)

    def start(self, system: System, *more: str) -> subprocess.Popen[bytes]:
        """Start a worker in its own process group."""
        return subprocess.Popen(
            [system.python, *system.arguments, *more],
            env=self.environment,
            cwd=self.folder,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=(self.folder / f"{system.name}.log").open("ab"),
            start_new_session=True,
        )

    def times(self, prefix: str = "") -> dict[str, float]:
        """{key: the time of its first mark}, for keys that begin with `prefix`."""
        found: dict[str, float] = {}
        if self.marks.exists():
            for line in self.marks.read_text().splitlines():
                key, at = line.split(" ")
                if key.startswith(prefix):
                    found.setdefault(key, float(at))
        return found

    def wait_mark(self, key: str, seconds: float = 30.0) -> float:
        """Wait for the mark `key`; returns its time."""
        give_up_at = time.monotonic() + seconds
        while time.monotonic() < give_up_at:
            if (at := self.times(key).get(key)) is not None:
                return at
            time.sleep(0.005)
        raise TimeoutError(f"{key} was not marked within {seconds:g} s")


def kill_group(process: subprocess.Popen[bytes]) -> None:
    """Kill the worker and all processes that it started, with SIGKILL."""
    os.killpg(process.pid, signal.SIGKILL)
    process.wait()
