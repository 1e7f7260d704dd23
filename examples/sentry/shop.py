"""A shop whose failures are reported.

``python shop.py`` sends its tasks, ``python shop.py endless`` one that the worker kills.
"""

import sys
import time

import sentry_sdk
from sentry_hooks import instrument

from aztask import App, RetryPolicy, Snooze

sentry_sdk.init(traces_sample_rate=1.0)  # the address is in SENTRY_DSN
app = App("shop", broker="local://", results="local://", retry=RetryPolicy(1, delay=0.1))
instrument(app)


class CardDeclined(Exception):
    """The bank refused the payment."""


@app.task
def charge(order: int) -> None:
    """Fail at every attempt, so that the retry fails too."""
    raise CardDeclined(f"order {order}")


@app.task
async def mail(order: int) -> str:
    """Succeed, so that only a transaction is reported."""
    return f"mail of order {order}"


@app.task
def wait_for_stock(order: int) -> None:
    """Come again later, which is no failure."""
    raise Snooze(3600)


@app.task(time_limit=0.5, retry=RetryPolicy(0))
def endless(order: int) -> None:
    """Be killed at the time limit."""
    time.sleep(60)


if __name__ == "__main__":
    with sentry_sdk.start_transaction(op="http.server", name="POST /orders"):
        for task in (endless,) if "endless" in sys.argv else (charge, mail, wait_for_stock):
            task.delay(7)
    sentry_sdk.flush()
