"""Sentry for an app, with aztask's hooks. Copy this module into your project.

::

    sentry_sdk.init(dsn=..., traces_sample_rate=0.1)
    instrument(app)
"""

from collections.abc import Iterator

import sentry_sdk

from aztask import App, Context, Reject, Retry, Snooze
from aztask.errors import LeaseLost
from aztask.hooks import KilledRun, Sending, WorkerInfo

NO_ERRORS = (Retry, Snooze, Reject, LeaseLost)
"""What a task raises on purpose, and a lost lease: another worker runs the task."""

TRACE, BAGGAGE = "sentry-trace", "baggage"


def instrument(app: App) -> None:
    """Report failed runs of the app's tasks, and continue traces from the send to the run.

    A failure that will be retried is a warning, the last one an error.
    """

    @app.around_send
    def pass_trace(sending: Sending) -> Iterator[None]:
        trace, baggage = sentry_sdk.get_traceparent(), sentry_sdk.get_baggage()
        sending.headers.update({TRACE: trace or "", BAGGAGE: baggage or ""})
        yield

    @app.around_run
    def report(context: Context) -> Iterator[None]:
        headers = {name: str(context.message.extra.get(name, "")) for name in (TRACE, BAGGAGE)}
        with sentry_sdk.isolation_scope() as scope:
            scope.set_tag("aztask.task", context.task)
            scope.set_tag("aztask.queue", context.queue)
            scope.set_context("aztask", _described(context))
            transaction = sentry_sdk.continue_trace(headers, op="queue.process", name=context.task)
            with sentry_sdk.start_transaction(transaction):
                try:
                    yield
                except NO_ERRORS:
                    raise
                except Exception as error:
                    retries = app.tasks[context.task].retry.max_retries
                    scope.set_level("error" if context.resubmit_count >= retries else "warning")
                    sentry_sdk.capture_exception(error)
                    raise

    @app.hooks.killed
    def report_killed(run: KilledRun) -> None:
        with sentry_sdk.isolation_scope() as scope:
            scope.set_tag("aztask.task", run.message.task)
            scope.set_context("aztask", {"task_id": run.message.id})
            sentry_sdk.capture_message(f"{run.error_type}: {run.error}", level="error")

    @app.around_process
    def flush(_: WorkerInfo) -> Iterator[None]:
        yield
        sentry_sdk.flush(timeout=2.0)  # a pool process ends without further code

    @app.around_worker
    def flush_worker(_: WorkerInfo) -> Iterator[None]:
        yield
        sentry_sdk.flush(timeout=2.0)


def _described(context: Context) -> dict[str, object]:
    return {
        "task_id": context.task_id,
        "failures before": context.resubmit_count,
        "delivery_count": context.delivery_count,
    }
