"""E-mails over a mail server that often refuses: retries, and one mail for each customer."""

from pathlib import Path

from aztask import AsyncResult, Context, RetryPolicy
from shop.app import app

OUTBOX = Path("outbox")


def deliver(address: str, text: str, attempt: int) -> None:
    """Stands for your mail server. For some addresses it refuses the first two attempts."""
    if "@" not in address:
        raise ValueError(f"{address!r} is not an address")
    if len(address) % 3 == 0 and attempt < 2:
        raise ConnectionRefusedError("the mail server is busy")
    OUTBOX.mkdir(exist_ok=True)
    with (OUTBOX / f"{address}.txt").open("a") as file:
        file.write(f"{text}\n")


# Only errors of the network are retried: a wrong address stays wrong, and is dead-lettered at once.
@app.task_with_context(retry=RetryPolicy(max_retries=5, delay=0.5, retry_on=(OSError,)))
def welcome(context: Context, address: str) -> int:
    """Send the welcome mail; returns the number of attempts."""
    deliver(address, "Welcome!", context.resubmit_count)
    return context.resubmit_count + 1


def send_welcome(address: str) -> AsyncResult[int]:
    """Welcome each address once, however often it is called: the id of the task says what it is."""
    return welcome.with_options(task_id=f"welcome:{address}").delay(address)
