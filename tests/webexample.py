"""An example with a web server and a worker, in a folder of its own, for tests over HTTP."""

import os
import shutil
import signal
import socket
import subprocess
import sys
from contextlib import contextmanager
from pathlib import Path

import httpx
from waiting import wait_until

from aztask.queues.servicebus.admin import ADMIN_VARIABLE
from aztask.testing import emulator

ROOT = Path(__file__).parents[1]


def free_port():
    """A port that is free now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


@contextmanager
def web_example(name, folder, broker):
    """A copy of the example `name`, on the broker `local` or `servicebus`."""
    results = f"local://{folder}/tasks.db"
    if broker == "local":
        yield WebExample(name, folder, results, results)
    else:
        with emulator(queues=["default"]) as bus:
            admin = {ADMIN_VARIABLE: bus.admin_connection_string}
            yield WebExample(name, folder, bus.connection_string, results, **admin)


class WebExample:
    """A copy of an example. `url`: its server's address."""

    def __init__(self, name, folder, broker, results, **environment):
        self.folder = folder / name
        shutil.copytree(ROOT / "examples" / name, self.folder)
        self.port = free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self.environment = {
            **os.environ,
            "PYTHONPATH": str(ROOT),
            "AZTASK_BROKER": broker,
            "AZTASK_RESULTS": results,
            **environment,
        }

    def run(self, *words):
        """Run a Python program of the example to its end."""
        done = subprocess.run(
            [sys.executable, *words],
            cwd=self.folder,
            env=self.environment,
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    @contextmanager
    def running(self, *programs):
        """Run programs, each a list of words, until the block ends; the server answers at once."""
        logs = [self.folder / f"log-{number}" for number in range(len(programs))]
        processes = []
        try:
            for words, log in zip(programs, logs, strict=True):
                with log.open("wb") as output:
                    processes.append(
                        subprocess.Popen(
                            [sys.executable, *words],
                            cwd=self.folder,
                            env=self.environment,
                            stdin=subprocess.DEVNULL,
                            stdout=output,
                            stderr=output,
                        )
                    )
            wait_until(self._answers, 30, "the server answers")
            yield
        except BaseException:
            print(*(log.read_text(errors="replace") for log in logs), sep="\n")
            raise
        finally:
            for process in processes:
                process.send_signal(signal.SIGTERM)
            for process in processes:
                try:
                    process.wait(15)
                except subprocess.TimeoutExpired:
                    process.kill()
                    process.wait()

    def _answers(self):
        try:
            return httpx.get(self.url, timeout=5).status_code == 200
        except httpx.TransportError:
            return False
