"""The cost of starting a worker, with a forked pool and with new interpreters.

Usage: python benchmarks/pool.py [> docs/benchmarks/pool.txt]

It starts a worker of eight processes on the embedded broker, with an app of one task. A worker
starts new interpreters if a thread runs before the app is imported: here, one of a module that
Python loads by itself. Figures are medians of interleaved rounds.
"""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from common import family, machine, megabytes, processor_seconds, spread

ROOT = Path(__file__).parents[1]
ROUNDS = 7
PROCESSES = 8
APP = """
from aztask import App
app = App("shop", broker="local://", results="local://")
@app.task
def noop(): pass
"""
AGENT = """
import sys, threading, time
if {"worker", "aztask.worker.pool.forkserver"} & set(sys.orig_argv):
    threading.Thread(target=time.sleep, args=(600,), daemon=True).start()
"""
KINDS = {"new interpreters": True, "forked": False}


def ready(pid: int) -> bool:
    """Whether a pool process has imported its app: from then on it has a second thread."""
    try:
        name = Path(f"/proc/{pid}/comm").read_text().rstrip()
        return name == "aztask-pool" and len(list(Path(f"/proc/{pid}/task").iterdir())) > 1
    except OSError:
        return False


def start(agent: bool) -> dict[str, float]:
    """Start a worker, and measure it when its whole pool is ready."""
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "shop.py").write_text(APP)
        if agent:
            Path(folder, "sitecustomize.py").write_text(AGENT)
        began = time.perf_counter()
        worker = subprocess.Popen(
            [sys.executable, "-m", "aztask", "-A", "shop", "worker", "-c", str(PROCESSES)],
            cwd=folder,
            env={**os.environ, "PYTHONPATH": os.pathsep.join([folder, str(ROOT)])},
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        try:
            while sum(map(ready, found := family(worker.pid))) < PROCESSES:
                if worker.poll() is not None or time.perf_counter() - began > 60:
                    raise RuntimeError("the worker did not start")
                time.sleep(0.01)
            seconds = time.perf_counter() - began
            time.sleep(0.3)
            return {
                "ready after, s": seconds,
                "processor time, s": sum(map(processor_seconds, found)),
                "memory, MB": sum(map(megabytes, found)),
            }
        finally:
            worker.terminate()
            worker.wait()


def main() -> None:
    """Measure all rounds and print the figures."""
    print(f"benchmark: starting a worker of {PROCESSES} processes, one small app")
    print(machine())
    print("command: python benchmarks/pool.py\n")
    figures: dict[str, list[float]] = defaultdict(list)
    for number in range(ROUNDS + 1):
        for kind, agent in KINDS.items():
            for name, value in start(agent).items():
                if number:  # the first round compiles the code
                    figures[f"{kind}: {name}"].append(value)
    for name, values in figures.items():
        print(f"  {name:<36} {spread(values)}")
    for what in ("ready after, s", "processor time, s", "memory, MB"):
        before, after = (statistics.median(figures[f"{kind}: {what}"]) for kind in KINDS)
        print(f"  {what.partition(',')[0]}: forked needs {after / before:.2f} of it")


if __name__ == "__main__":
    main()
