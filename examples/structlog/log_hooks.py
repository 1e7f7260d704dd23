"""structlog for an app, with aztask's hooks. Copy this module into your project."""

import time
from collections.abc import Iterator

import structlog
from structlog.contextvars import bound_contextvars, get_contextvars, merge_contextvars

from aztask import App, Context
from aztask.hooks import Sending

HEADER = "log-context"
PASSED = ("request_id", "customer")
"""The bound values that travel from the sender to the run."""


def configure() -> None:
    """Print JSON lines with everything that is bound."""
    structlog.configure(
        processors=[
            merge_contextvars,
            structlog.processors.add_log_level,
            structlog.processors.TimeStamper(fmt="iso", utc=True),
            structlog.processors.format_exc_info,
            structlog.processors.JSONRenderer(),
        ],
    )


def instrument(app: App) -> None:
    """Bind task, id and attempt to every log line of a run, and what its sender had bound."""
    log = structlog.get_logger("tasks")

    @app.around_send
    def pass_context(sending: Sending) -> Iterator[None]:
        bound = get_contextvars()
        sending.headers[HEADER] = {name: str(bound[name]) for name in PASSED if name in bound}
        yield

    @app.around_run
    def bind(context: Context) -> Iterator[None]:
        values = dict(context.message.extra.get(HEADER) or {})
        values.update(task=context.task, task_id=context.task_id)
        started = time.monotonic()
        with bound_contextvars(**values, attempt=context.resubmit_count + 1):
            try:
                yield
            except Exception as error:
                log.warning("failed", error=f"{type(error).__name__}: {error}")
                raise
            log.info("succeeded", seconds=round(time.monotonic() - started, 3))
