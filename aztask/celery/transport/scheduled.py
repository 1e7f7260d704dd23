"""``celery inspect scheduled`` and ``query_task``, with the tasks that wait in the broker.

Celery's commands look at the timer of the worker. Here a task with an ``eta`` waits in the broker,
so they would know nothing of it. In a Celery worker on one of our addresses they look there, too.

Rules
1. They peek: nothing is leased, moved or counted as a delivery.
2. Every worker of a queue lists the same tasks, because it is not known which one will run them.
3. They know what is among the first `MOST_READ` messages of each queue. A remote service is read on
   a thread, for `ANSWER_SECONDS` at most: an event loop must not stand still for longer. A log line
   says when there may be more.
4. A service that does not show delayed messages is not asked: Storage queues.
5. The tasks look as Celery itself shows them, by its own class `Request`. What a worker of this app
   could not read, or does not know, is skipped.
"""

from __future__ import annotations

import logging
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from time import monotonic, time
from typing import Any, Final

from aztask.celery.transport.channel import Channel
from aztask.errors import AztaskError

logger = logging.getLogger(__name__)

MOST_READ: Final = 1000
PAGE: Final = 250
"""As many as one answer of Service Bus has."""

ANSWER_SECONDS: Final = 1.5

PRIORITY: Final = 6
"""With which Celery puts tasks with an eta into its timer."""


def extend_inspect() -> None:
    """Have the commands of this process look into the broker, too. Idempotent.

    Without Celery's worker in this process there are no commands, and nothing happens.
    """
    control = sys.modules.get("celery.worker.control")
    if control is None:
        return
    commands, waiting = control.Panel.data, WaitingTasks(control.Request)
    for name, kind in COMMANDS.items():
        own = commands.get(name)
        if own is not None and not isinstance(own, ExtendedCommand):
            commands[name] = kind(own, waiting)


class WaitingTasks:
    """The tasks that wait in the queues that a worker consumes, read anew for each command."""

    def __init__(self, request: Callable[..., Any]) -> None:
        """request: Celery's class of a received task."""
        self._request = request
        self._reading: threading.Thread | None = None

    def read(self, state: Any) -> list[dict[str, Any]]:
        """As ``inspect scheduled`` lists them. Never raises for what the broker does.

        state: what Celery gives to a command.
        """
        channel = getattr(state.consumer.task_consumer, "channel", None)
        if not isinstance(channel, Channel):
            return []
        messages = self._messages(channel)
        return [entry for message in messages for entry in self._entries(message, state)]

    def _messages(self, channel: Channel) -> list[Any]:
        can = channel.link.broker.capabilities
        found: list[Any] = []
        if not can.paged_peek:
            return found
        if not can.remote:
            _read(channel, found)
            return found
        if self._reading is None or not self._reading.is_alive():
            self._reading = threading.Thread(
                target=_read, args=(channel, found), name="aztask-scheduled", daemon=True
            )
            self._reading.start()
        self._reading.join(ANSWER_SECONDS)
        if self._reading.is_alive():
            logger.warning(
                "the broker did not show all tasks with an eta within %g s: the answer has what"
                " came until then",
                ANSWER_SECONDS,
            )
        return list(found)

    def _entries(self, message: Any, state: Any) -> Iterator[dict[str, Any]]:
        """The task as the command shows it; nothing if it is none of this app (rule 5)."""
        try:
            request = self._request(message, app=state.app, hostname=state.hostname)
            eta = request.eta.isoformat()
            entry = {"eta": eta, "priority": PRIORITY, "request": request.info()}
        except Exception:  # any program may write to the queue, and Celery trusts its messages
            logger.debug("a message is not a task of this app", exc_info=True)
            return
        yield entry


@dataclass(frozen=True, slots=True)
class ExtendedCommand:
    """A command of Celery's worker, `own`, that looks into the broker, too."""

    own: Callable[..., Any]
    waiting: WaitingTasks


class ScheduledCommand(ExtendedCommand):
    """``inspect scheduled``: the tasks of the worker's timer, then those in the broker."""

    def __call__(self, state: Any, **arguments: Any) -> list[dict[str, Any]]:
        """One entry for each id; the worker's own are the more exact ones."""
        found: list[dict[str, Any]] = self.own(state, **arguments)
        known = {each["request"]["id"] for each in found}
        return found + [
            entry for entry in self.waiting.read(state) if entry["request"]["id"] not in known
        ]


class QueryCommand(ExtendedCommand):
    """``inspect query_task``: of ids that the worker does not know, those in the broker."""

    def __call__(self, state: Any, ids: Any, **arguments: Any) -> dict[str, Any]:
        """The state and the request by id, of one id or of several."""
        found: dict[str, Any] = self.own(state, ids, **arguments)
        unknown = {ids} if isinstance(ids, str) else set(ids or ())
        unknown -= set(found)
        if not unknown:
            return found
        requests = [entry["request"] for entry in self.waiting.read(state)]
        waiting = {each["id"]: ("scheduled", each) for each in requests if each["id"] in unknown}
        return {**found, **waiting}


COMMANDS: Final[Mapping[str, type[ExtendedCommand]]] = {
    "scheduled": ScheduledCommand,
    "dump_schedule": ScheduledCommand,  # its older name
    "query_task": QueryCommand,
}


def _read(channel: Channel, found: list[Any]) -> None:
    """Add what waits in the queues that the channel consumes; an error of the broker is logged."""
    ends_at = monotonic() + ANSWER_SECONDS
    try:
        for source in channel.task_sources():
            read, after = 0, None
            while page := channel.link.broker.peek(
                source.source.address, after=after, limit=min(PAGE, MOST_READ - read)
            ):
                waiting = (channel.waiting(source, each, time()) for each in page)
                found.extend(message for message in waiting if message is not None)
                read, after = read + len(page), page[-1].position
                if monotonic() > ends_at:
                    return
                if read >= MOST_READ:
                    logger.info(
                        "celery inspect looked for tasks with an eta at the first %d messages of"
                        " queue %s; there may be more",
                        read,
                        source.source.queue,
                    )
                    break
    except AztaskError as error:
        logger.warning(
            "celery inspect cannot list the tasks with an eta that wait in the broker: %s", error
        )
    except Exception:  # an SDK may raise anything, also because the connection was closed
        logger.exception("celery inspect cannot list the tasks with an eta that wait in the broker")
