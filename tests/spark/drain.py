"""Real workers that empty a queue of `spark_shop`, and the ledger that its tasks write."""

import os
import subprocess
import sys
from collections import Counter
from pathlib import Path


def drained(queue, *arguments, **environment):
    """Run one worker until the queue is empty."""
    ended = subprocess.run(
        [
            *(sys.executable, "-m", "aztask", "worker", "-A", "spark_shop", "-Q", queue),
            *("--burst", *arguments),
        ],
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert ended.returncode == 0, ended.stderr[-3000:]


def executions(folder: Path, prefix: str) -> Counter[str]:
    """{a task's line: how often it is in the ledger}, of lines that begin with `prefix`."""
    lines = (folder / "ledger").read_text().splitlines()
    return Counter(line for line in lines if line.startswith(prefix))
