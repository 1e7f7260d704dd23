"""What the fixtures for tests of tasks cost: inline mode, and a real worker in the background.

Usage: python benchmarks/fixtures.py [--check] [> docs/benchmarks/fixtures.txt]

Each figure is that of whole runs of pytest as a user starts them, the middle of several runs.
"""

from __future__ import annotations

import os
import re
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from common import Check, conclude, machine

TESTS = 100
RUNS = 5
SHOP = """
from aztask import App

app = App("shop", broker="local://")


@app.task
def add(a, b):
    return a + b
"""
HEAD = f"""
import pytest
from shop import add

NUMBERS = pytest.mark.parametrize("n", range({TESTS}))
"""
BODIES = {
    "function": "@NUMBERS\ndef test(n):\n    assert add(n, 1) == n + 1\n",
    "inline": "@NUMBERS\ndef test(n, aztask_inline):\n    assert add.delay(n, 1).get() == n + 1\n",
    "worker": "@NUMBERS\ndef test(n, aztask_worker):\n"
    "    assert add.delay(n, 1).get(timeout=30) == n + 1\n",
}
TIMED = re.compile(r"^([\d.]+)s (setup|call|teardown) +\S+\[(\d+)\]$", re.MULTILINE)


def run(kind: str) -> dict[tuple[str, int], float]:
    """The seconds of each phase of each test."""
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "shop.py").write_text(SHOP)
        Path(folder, "pytest.ini").write_text("[pytest]\naztask_app = shop:app\n")
        Path(folder, "test_shop.py").write_text(HEAD + BODIES[kind])
        command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--durations=0"]
        command += ["--durations-min=0", "-vv", "-p", "aztask.testing.plugin"]
        path = os.pathsep.join([folder, str(Path(__file__).parents[1])])
        done = subprocess.run(
            command,
            cwd=folder,
            env={**os.environ, "PYTHONPATH": path},
            capture_output=True,
            text=True,
            check=True,
        )
    found = {
        (phase, int(number)): float(seconds)
        for seconds, phase, number in TIMED.findall(done.stdout)
    }
    assert len(found) == 3 * TESTS, done.stdout
    return found


def total(times: dict[tuple[str, int], float]) -> float:
    """The seconds of all tests together."""
    return sum(times.values())


def main() -> None:
    """Measure everything."""
    print(machine(), "\n")
    plain = statistics.median(total(run("function")) for _ in range(RUNS))
    inline = statistics.median(total(run("inline")) for _ in range(RUNS)) - plain
    workers = [run("worker") for _ in range(RUNS)]
    ready = statistics.median(times["setup", 0] for times in workers)
    first = statistics.median(
        sum(times[phase, 0] for phase in ("setup", "call", "teardown")) for times in workers
    )
    others = statistics.median((total(times) - times["setup", 0]) / TESTS for times in workers)
    print(f"{TESTS} tests in inline mode: {inline:.2f} s more than calls of the function")
    print(f"the worker of aztask_worker is ready after {ready:.2f} s, before the first test;")
    print(f"that test takes {first:.2f} s in all, each other one {1000 * others:.0f} ms")
    conclude(
        [
            Check(f"{TESTS} inline tests add", inline, 1.0, "s", at_least=False),
            Check("the worker is ready", ready, 0.5, "s", at_least=False),
            Check("the first test with a worker takes", first, 1.0, "s", at_least=False),
            Check("each other test with it", others, 0.1, "s", at_least=False),
        ]
    )


if __name__ == "__main__":
    main()
