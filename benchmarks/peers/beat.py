"""What Celery beat does when two of them run, and after a pause: docs/discussions/schedulers.md.

Usage: python benchmarks/peers/beat.py

Each beat is a real process on Kombu's filesystem transport; the messages in the folder are counted.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
import time
from pathlib import Path

APP = """
from celery import Celery

app = Celery("tries", broker="filesystem://")
app.conf.broker_transport_options = {
    "data_folder_in": "queue", "data_folder_out": "queue", "control_folder": "control"
}
app.conf.beat_schedule = {"tick": {"task": "tick", "schedule": 2.0}}
app.conf.beat_max_loop_interval = 0.2
"""


def beat(folder: Path, name: str) -> subprocess.Popen[bytes]:
    """Start a beat with a schedule file of its own."""
    command = [sys.executable, "-m", "celery", "-A", "tries", "beat"]
    return subprocess.Popen(
        [*command, "-s", name, "--pidfile", f"{name}.pid"],
        cwd=folder,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )


def sent(folder: Path) -> int:
    """How many messages there are."""
    return len(list((folder / "queue").iterdir()))


def tried(names: list[str], seconds: float) -> tuple[Path, int]:
    """Run these beats beside each other; returns their folder and how many tasks they sent."""
    folder = Path(tempfile.mkdtemp())
    (folder / "tries.py").write_text(APP)
    for name in ("queue", "control"):
        (folder / name).mkdir()
    beats = [beat(folder, name) for name in names]
    while not sent(folder):
        time.sleep(0.1)
    time.sleep(seconds)
    for each in beats:
        each.terminate()
        each.wait()
    return folder, sent(folder)


def main() -> None:
    """Try and print."""
    folder, alone = tried(["one"], 10.0)
    _, both = tried(["one", "two"], 10.0)
    print(f"a task every 2 s, for 10 s: one beat sent {alone}, two sent {both}")
    time.sleep(12.0)
    before = sent(folder)
    again = beat(folder, "one")
    while sent(folder) == before:
        time.sleep(0.05)
    time.sleep(0.8)
    print(f"after 12 s without a beat, 6 of them due: {sent(folder) - before} sent at the start")
    again.terminate()
    again.wait()


if __name__ == "__main__":
    main()
