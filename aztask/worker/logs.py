"""The log of a worker and of its pool processes: plain lines or JSON lines on stderr.

Rules
1. A record that is written while a task runs carries the task's id.
2. Every handler masks secrets. The filter is on the handler, because a filter on a logger does not
   see the records of its child loggers.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Mapping
from datetime import UTC, datetime
from typing import Final

from aztask.context import current_context
from aztask.message.message import TaskMessage
from aztask.retry import EXPIRED
from aztask.settlement import DeadLetter, Decision, Resubmit
from aztask.support.display import SecretFilter, visible

FORMATS: Final = ("plain", "json")
LOG_TASKS: Final = ("auto", "all", "off")
LEVELS: Final = ("debug", "info", "warning", "error")
WITHOUT_DELAY: Final = {"abandon": "at once", "lease-timeout": "when its lease ends"}
"""The retry strategies that do not wait for the policy's delay, and when they retry."""

NOISY: Final = ("azure", "urllib3", "httpx", "asyncio", "kombu", "amqp", "watchfiles")
"""Loggers that write a line for each request or each file at level INFO."""


_further: list[Callable[[], Mapping[str, str]]] = []


def add_log_fields(fields: Callable[[], Mapping[str, str]]) -> None:
    """Add fields to the log's JSON lines. fields: called for each record; must be quick."""
    if fields not in _further:
        _further.append(fields)


class TaskFilter(logging.Filter):
    """Adds ``task_id`` and ``task`` to records; both are "" outside tasks. Adds further fields
    (`add_log_fields`) as ``further``.
    """

    def filter(self, record: logging.LogRecord) -> bool:
        """Add the fields; always True, so every record is kept."""
        context = current_context()
        record.task_id = context.task_id if context else ""
        record.task = context.task if context else ""
        record.further = {name: text for each in _further for name, text in each().items()}
        return True


class PlainFormatter(logging.Formatter):
    """``time LEVEL logger: [task id] message``."""

    def __init__(self) -> None:
        super().__init__("%(asctime)s %(levelname)s %(name)s: %(message)s")

    def format(self, record: logging.LogRecord) -> str:
        """The record; control characters are escapes, and further lines are indented.

        So no text that is logged can move the cursor or look like a record of its own.
        """
        first, *rest = super().format(record).split("\n")
        return "\n".join([visible(first), *(f"    {visible(line)}" for line in rest)])

    def formatMessage(self, record: logging.LogRecord) -> str:  # noqa: N802  # logging's name
        """The line, with the task's id before the message if a task runs."""
        task_id = getattr(record, "task_id", "")
        if task_id:
            record.message = f"[{task_id}] {record.message}"
        return super().formatMessage(record)


class JsonFormatter(logging.Formatter):
    """One JSON object per line: ts (ISO 8601, UTC), level, logger, message; within a task also
    task_id and task; with telemetry also trace_id and span_id; after an exception also error (the
    traceback).
    """

    def format(self, record: logging.LogRecord) -> str:
        """The record as one line of JSON."""
        fields = {
            "ts": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname,
            "logger": record.name,
            "message": record.getMessage(),
        }
        for name in ("task_id", "task"):
            if value := getattr(record, name, ""):
                fields[name] = value
        fields |= getattr(record, "further", {})
        if record.exc_info and not record.exc_text:
            record.exc_text = self.formatException(record.exc_info)
        if record.exc_text:
            fields["error"] = record.exc_text
        return json.dumps(fields)


def next_step(
    decision: Decision,
    message: TaskMessage,
    *,
    max_retries: int,
    strategy: str,
    now: float,
    settled: bool = False,
) -> str:
    """What follows a failed run, for its log line, such as ``retry 2 of 3 in 4.0 s``.

    * decision: the retry policy's. strategy: how the message waits.
    * now: UTC epoch seconds.
    * settled: the message was completed before the run (at-most-once).
    """
    if settled:
        return "not retried, because its delivery is at-most-once"
    if isinstance(decision, DeadLetter):
        return f"dead-lettered: {decision.reason}"
    if not isinstance(decision, Resubmit):
        return "not retried"
    waits = decision.asked or strategy not in WITHOUT_DELAY
    delay = decision.delay if waits else 0.0
    if message.expires is not None and now + delay >= message.expires:
        return f"dead-lettered: {EXPIRED}"
    when = f"in {brief_seconds(delay)}" if waits else WITHOUT_DELAY[strategy]
    if not decision.counted:
        return f"runs again {when}"
    return f"retry {message.resubmit_count + 1} of {max_retries} {when}"


def brief_seconds(value: float) -> str:
    """``0.012 s``, ``4.0 s`` or ``600 s``."""
    return (
        f"{value:.3f} s" if 0 < value < 1 else f"{value:.1f} s" if value < 100 else f"{value:.0f} s"
    )


def configure(log_format: str, level: int = logging.INFO) -> None:
    """Write the root logger's records to stderr in `log_format`, replacing earlier handlers."""
    handler = logging.StreamHandler()
    handler.setFormatter(JsonFormatter() if log_format == "json" else PlainFormatter())
    handler.addFilter(TaskFilter())
    handler.addFilter(SecretFilter())
    logging.basicConfig(level=level, handlers=[handler], force=True)
    for name in NOISY:
        logging.getLogger(name).setLevel(max(level, logging.WARNING))


def configured() -> tuple[str, int]:
    """The current (format, level), which a pool process takes over."""
    root = logging.getLogger()
    is_json = any(isinstance(handler.formatter, JsonFormatter) for handler in root.handlers)
    return ("json" if is_json else "plain"), root.getEffectiveLevel()
