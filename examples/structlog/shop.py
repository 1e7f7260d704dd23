"""A shop that logs with structlog. ``python shop.py`` sends its tasks."""

import asyncio

import structlog
from log_hooks import configure, instrument

from aztask import App, RetryPolicy

configure()
app = App("shop", broker="local://", results="local://", retry=RetryPolicy(1, delay=0.1))
instrument(app)
log = structlog.get_logger()


@app.task
def charge(order: int) -> None:
    """Fail in the first attempt and succeed in the second."""
    log.info("asking the bank", order=order)
    if structlog.contextvars.get_contextvars()["attempt"] == 1:
        raise TimeoutError("the bank does not answer")


@app.task
async def mail(order: int) -> None:
    """Log before and after waiting, while other tasks log too."""
    log.info("connecting", order=order)
    await asyncio.sleep(0.05)
    log.info("sent", order=order)


if __name__ == "__main__":
    for order in (1, 2, 3):
        with structlog.contextvars.bound_contextvars(request_id=f"r-{order}"):
            charge.delay(order)
            mail.delay(order)
