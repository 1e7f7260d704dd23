"""The app of the tests, which executors and workers import; see `conftest.shop`."""

import os
import time
from pathlib import Path

from aztask import App, Context, RetryPolicy

FOLDER = Path(os.environ["SPARK_SHOP_FOLDER"])

app = App("shop", broker=os.environ["SPARK_SHOP_BROKER"], results=f"local://{FOLDER}/queues.db")

(FOLDER / f"pid-{os.getpid()}").touch()


def note(text: str) -> None:
    """Append a line to the ledger, which survives the process."""
    fd = os.open(FOLDER / "ledger", os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
    try:
        os.write(fd, f"{text}\n".encode())
    finally:
        os.close(fd)


@app.task
def resize(path: str, width: int, quality: int = 90) -> str:
    note(path)
    return f"{path}:{width}:{quality}"


@app.task(queue="own", expires=3600.0)
def anything(**values: object) -> str:
    return repr(values)


@app.task_with_context
def crawl(context: Context, url: str) -> str:
    return url


@app.task(retry=RetryPolicy(max_retries=0))
def squared(number: int) -> int:
    if number == 0:
        raise ValueError("no number")
    return number * number


@app.task
def slow(path: str) -> None:
    note(path)
    time.sleep(0.001)
