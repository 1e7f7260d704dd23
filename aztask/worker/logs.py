"""The log of a worker and of its pool processes: plain lines or JSON lines on stderr.

Rules
1. A record that is written while a task runs carries the task's id.
2. Every handler masks secrets. The filter is on the handler, because a filter on a logger does not
   see the records of its child loggers.
"""

from __future__ import annotations

import json
import logging
from datetime import UTC, datetime
from typing import Final

from aztask.context import current_context
from aztask.settlement import DeadLetter, Decision, Resubmit
from aztask.support.display import visible
from aztask.support.masking import SecretFilter

FORMATS: Final = ("plain", "json")
NOISY: Final = ("azure", "urllib3", "asyncio", "kombu", "amqp", "watchfiles")
"""Loggers that write a line for each request or each file at level INFO."""


class TaskFilter(logging.Filter):
    """Adds ``task_id`` and ``task`` to records; both are "" outside tasks."""

    def filter(self, record: logging.LogRecord) -> bool:
        """Add the fields; always True, so every record is kept."""
        context = current_context()
        record.task_id = context.task_id if context else ""
        record.task = context.task if context else ""
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
    task_id and task; after an exception also error (the traceback).
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
        if record.exc_info and not record.exc_text:
            record.exc_text = self.formatException(record.exc_info)
        if record.exc_text:
            fields["error"] = record.exc_text
        return json.dumps(fields)


def next_step(decision: Decision) -> str:
    """What follows a failed run, for its log line; the retry strategy decides when."""
    if isinstance(decision, Resubmit):
        return "it will be retried"
    if isinstance(decision, DeadLetter):
        return f"it is dead-lettered ({decision.reason})"
    return "it is not retried"


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
