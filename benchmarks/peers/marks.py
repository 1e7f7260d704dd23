"""The work of every system's `mark` task: write a line that survives the process."""

import os
import time


def leave(key: str, seconds: float = 0.0) -> None:
    """Append ``KEY TIME`` to the file of marks, after `seconds`."""
    if seconds:
        time.sleep(seconds)
    line = f"{key} {time.time():.6f}\n".encode()
    descriptor = os.open(os.environ["BENCH_MARKS"], os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
    os.write(descriptor, line)
    os.close(descriptor)


def ready(**_: object) -> None:
    """Mark that this Celery worker consumes; a receiver of Celery's signal `worker_ready`."""
    if "BENCH_MARKS" in os.environ:
        leave(f"ready-{os.getpid()}")
