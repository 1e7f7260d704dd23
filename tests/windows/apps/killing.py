"""``killing.py POOL``: starts a worker, and ends it by TerminateProcess while its task holds on."""

import subprocess
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path.cwd()))  # the embeddable Python does not look beside a program
from shop import app, hold

hold.delay(600)
worker = subprocess.Popen(
    [sys.executable, "-m", "aztask", "-A", "shop", "worker", "--pool", sys.argv[1], "-c", "2"]
)
give_up_at = time.monotonic() + 200
while not app.broker.stats("default").leased:
    assert worker.poll() is None, "the worker has ended"
    assert time.monotonic() < give_up_at, "the task was not leased"
    time.sleep(0.2)
time.sleep(3)  # the task holds the interpreter
worker.kill()
worker.wait()
print("killed", worker.pid)
