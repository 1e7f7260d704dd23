"""The mailboxes of one connection: temporary queues that other processes publish to by exchange.

Kombu declares a temporary queue (exclusive or deleted with its consumer) and then binds it to an
exchange: a worker's queue for remote control, a client's queue for replies, a monitor's for events.

Rules
1. Such a queue becomes a mailbox (`aztask.queues.base`) when it is bound to an exchange. One
   that is used without being bound is an ordinary queue: Celery's ``rpc://`` results work so.
2. A thread keeps the mailboxes while the process lives, however long a task occupies the consumer.
3. A worker that may not create its mailbox goes on without remote control, and says so. A client
   that may not create one for its replies gets the error: no answer would look like no worker.
4. After a fork the parent's mailboxes are the parent's.
5. Tasks that are revoked while no worker runs, or before a worker starts, are revoked for it, too:
   see the end of this module.
"""

from __future__ import annotations

import json
import logging
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Final

from kombu.exceptions import KombuError
from kombu.serialization import loads

from aztask.address.owner import Identified
from aztask.errors import AztaskError, BrokerUnavailable, CapabilityError
from aztask.message.envelope import Envelope
from aztask.queues.base import (
    EXCHANGE,
    ROUTING_KEY,
    Binding,
    Broadcaster,
    Broker,
    Mailboxes,
    Receiver,
)
from aztask.support.clock import monotonic
from aztask.support.parts import Part

logger = logging.getLogger(__name__)

CONTROL: Final = ".pidbox"
"""How the names of mailboxes for commands end (`kombu.pidbox.Mailbox.get_queue`)."""

_HELD_UNTIL: dict[str, float] = {}
"""Until when tasks are hidden that this program sends, by the broker's identity; monotonic."""

NO_CONTROL: Final = (
    "remote control and events are off for this connection; remove remote_control=False from"
    " broker_transport_options to use them"
)


@dataclass(slots=True)
class Box:
    """One mailbox. usable: False if it could not be created (rule 3)."""

    bindings: set[Binding] = field(default_factory=set)
    usable: bool = True


class Boxes:
    """The mailboxes and undecided temporary queues of one connection. Any thread may call."""

    def __init__(self, broker: Broker, *, enabled: bool) -> None:
        self._broker = broker
        self._enabled = enabled
        self._mailboxes: Mailboxes | None = None
        self.undecided: set[str] = set()
        self._boxes: dict[str, Box] = {}
        self._lock = threading.RLock()
        self._stop = threading.Event()
        self._part = Part("mailboxes")
        self._thread: threading.Thread | None = None

    @property
    def mailboxes(self) -> Mailboxes:
        """The broker's mailboxes. Raises CapabilityError if it has none."""
        if self._mailboxes is None:
            if not isinstance(self._broker, Broadcaster):
                name = self._broker.capabilities.name
                raise CapabilityError(f"the broker {name} has no remote control and no events")
            self._mailboxes = self._broker.mailboxes()
        return self._mailboxes

    # -- declaring ---------------------------------------------------------------------------

    def declare(self, queue: str) -> bool:
        """A temporary queue was declared; returns False if mailboxes are off."""
        if self._enabled and queue not in self._boxes:
            self.undecided.add(queue)
        return self._enabled

    def take_undecided(self, queue: str | None = None) -> list[str]:
        """The temporary queues that are used before they were bound: ordinary ones (rule 1)."""
        if not self.undecided:
            return []
        with self._lock:
            found = [name for name in self.undecided if queue is None or name == queue]
            self.undecided.difference_update(found)
        return found

    def bind(self, queue: str, binding: Binding) -> bool:
        """Bind a temporary queue to an exchange, as a mailbox.

        Returns False if the queue is not temporary. Raises what `Mailboxes.open` raises, unless the
        mailbox is for broadcasts (rule 3).
        """
        with self._lock:
            if queue not in self.undecided and queue not in self._boxes:
                return False
            self.undecided.discard(queue)
            box = self._boxes.setdefault(queue, Box())
            box.bindings.add(binding)
        try:
            self.mailboxes.open(queue, sorted(box.bindings))
        except AztaskError as error:
            if binding.kind != "fanout" or isinstance(error, BrokerUnavailable):
                self._boxes.pop(queue, None)
                raise
            box.usable = False
            logger.warning("remote control of this process does not work: %s", error)
        self._keep()
        return True

    def has(self, queue: str) -> bool:
        """True if the queue is a mailbox of this connection."""
        return queue in self._boxes

    def is_control(self, queue: str) -> bool:
        """True if the mailbox is for commands to this process: a `kombu.pidbox.Node`."""
        box = self._boxes.get(queue)
        kinds = {each.kind for each in box.bindings} if box is not None else set()
        return queue.endswith(CONTROL) and kinds == {"fanout"}

    def usable(self, queue: str) -> bool:
        """True if the mailbox could be created."""
        box = self._boxes.get(queue)
        return box is not None and box.usable

    def receiver(self, queue: str, delete: bool) -> Receiver:
        """A receiver of the mailbox."""
        return self.mailboxes.receiver(queue, delete=delete)

    def wanted(self, queue: str, envelope: Envelope) -> bool:
        """True if the mailbox is bound for this message; a service may send it too many."""
        box = self._boxes.get(queue)
        exchange, key = (envelope.headers.get(name) for name in (EXCHANGE, ROUTING_KEY))
        if box is None or not isinstance(exchange, str) or not isinstance(key, str):
            return box is not None
        return any(each.matches(exchange, key) for each in box.bindings)

    def delete(self, queue: str) -> None:
        """Remove the mailbox; if the broker is unreachable, it expires by itself."""
        with self._lock:
            box = self._boxes.pop(queue, None)
        if box is not None and box.usable:
            try:
                self.mailboxes.delete(queue)
            except AztaskError as error:
                logger.info("mailbox %s was not removed, it will expire: %s", queue, error)

    # -- publishing --------------------------------------------------------------------------

    def publish(self, exchange: str, key: str, envelope: Envelope, *, recent: bool = False) -> bool:
        """Send a copy to each mailbox that is bound for it; False if there is none.

        recent: see `Mailboxes.publish`.
        """
        if not self._enabled or not isinstance(self._broker, Broadcaster):
            return False
        headers = {**envelope.headers, EXCHANGE: exchange, ROUTING_KEY: key}
        copy = replace(envelope, headers=headers)
        return self.mailboxes.publish(exchange, key, copy, recent=recent)

    def lead(self) -> float:
        """Seconds for which a task is hidden that is sent now, so that what was revoked just
        before comes first."""
        if not _HELD_UNTIL:  # nearly always
            return 0.0
        now = monotonic()
        if max(tuple(_HELD_UNTIL.values())) <= now or not isinstance(self._broker, Identified):
            return 0.0
        return max(0.0, _HELD_UNTIL.get(self._broker.identity, 0.0) - now)

    def hold_tasks(self) -> None:
        """Hide the tasks that this program sends, for as long as what it has revoked may take."""
        if isinstance(self._broker, Identified) and (lag := self.mailboxes.lag):
            _HELD_UNTIL[self._broker.identity] = monotonic() + lag

    def keep_revoked(self, exchange: str, message: Mapping[str, Any]) -> bool:
        """If the message revokes tasks, keep that for workers that start later; whether it does.

        It comes before the message is published, so a worker that starts in between is told.
        """
        if not self._enabled or not exchange.endswith(CONTROL):
            return False
        notes = revoked_by(message)
        if notes and isinstance(self._broker, Broadcaster):
            try:
                self.mailboxes.keep(exchange, notes)
            except BrokerUnavailable:
                raise
            except AztaskError as error:
                logger.warning("only workers that run now are told what is revoked: %s", error)
            return True
        return False

    def revoked(self, queue: str) -> list[dict[str, Any]]:
        """For a Celery worker's mailbox for commands: the commands that revoke what was kept."""
        # A plain kombu program may have a mailbox for commands, which are its own.
        celery = "celery.worker.control" in sys.modules
        if not (celery and self.is_control(queue) and self.usable(queue)):
            return []
        try:
            notes = [
                note
                for binding in sorted(self._boxes[queue].bindings)
                for note in self.mailboxes.kept(binding.exchange)
            ]
        except BrokerUnavailable:
            raise
        except AztaskError as error:
            logger.warning("not known which tasks were revoked before this worker: %s", error)
            return []
        return commands_for(notes)

    # -- keeping -----------------------------------------------------------------------------

    def _keep(self) -> None:
        with self._lock:
            if self._thread is None:
                self._thread = self._part.thread(self._run, "aztask-mailboxes")
                self._thread.start()

    def _run(self) -> None:
        while not self._stop.wait(self.mailboxes.lifetime / 3):
            for queue in list(self._boxes):
                try:
                    self.renew(queue)
                except AztaskError as error:
                    logger.info("mailbox %s is not kept, trying again: %s", queue, error)
                except Exception:  # an SDK may raise anything; the next attempt may succeed
                    logger.exception("mailbox %s is not kept, trying again", queue)

    def renew(self, queue: str) -> None:
        """Keep the mailbox, or create it again if the broker has removed it."""
        box = self._boxes.get(queue)
        if box is not None and box.usable:
            self.mailboxes.open(queue, sorted(box.bindings))

    def close(self) -> None:
        """Remove the mailboxes that are left, and stop the thread."""
        self._stop.set()
        self._part.stop()
        for queue in list(self._boxes):
            self.delete(queue)


# -- The pump --------------------------------------------------------------------------------------
#
# Receives a mailbox of a remote broker on a thread of its own.
#
# The thread that drains a connection waits at the task queue, where messages come and requests cost
# money. So it cannot wait at the mailbox too: a control command would come late, or tasks would.


WAIT_SECONDS: Final = 0.25
"""How long one receive waits, and so how long stopping may take."""

PAUSE_SECONDS: Final = 2.0


class Pump:
    """Calls `fetch` again and again, from `start` until it is stopped.

    * `fetch`: receives, waiting at most the given seconds, and hands over what came.
    """

    def __init__(self, fetch: Callable[[float], object], queue: str) -> None:
        self._fetch = fetch
        self._queue = queue
        self._stop = threading.Event()
        self._part = Part(f"mailbox {queue}")
        self._thread = self._part.thread(self._run, "aztask-mailbox")

    def start(self) -> None:
        """Call it from now on, on a thread of its own."""
        self._thread.start()

    def stop(self) -> None:
        """End the thread: when this returns, it takes no further message."""
        self._stop.set()
        self._part.stop()
        if self._thread is not threading.current_thread():
            self._thread.join(4 * WAIT_SECONDS + PAUSE_SECONDS)

    def _run(self) -> None:
        while not self._stop.is_set():
            try:
                self._fetch(WAIT_SECONDS)
            except AztaskError as error:
                if not self._stop.is_set():
                    logger.info("mailbox %s: %s; trying again", self._queue, error)
                    self._stop.wait(PAUSE_SECONDS)
            except Exception:  # an SDK may raise anything; the next attempt may succeed
                if not self._stop.is_set():
                    logger.exception("mailbox %s: the receive failed; trying again", self._queue)
                    self._stop.wait(PAUSE_SECONDS)


# -- What was revoked ------------------------------------------------------------------------------
#
# Celery tells only the workers that run what is revoked, and a worker that starts asks the others,
# but only on Redis, RabbitMQ and Google's Pub/Sub. Here a starting worker is told by the transport.
#
# Rules
# 1. Commands to all workers that revoke by id or by stamps are kept, as notes (`Mailboxes.keep`),
#    for as long as a worker would know them. Commands to named workers are for these.
# 2. A worker is told all ids in one command, ``hello``, with which Celery's workers tell each other
#    their ids. The command ``revoke`` would cost a request to the result backend for each id, and
#    end tasks.
# 3. It is told before its mailbox is read, and so before it takes a task: Celery starts remote
#    control first. With gevent and eventlet it starts both side by side, so a task may come first.
# 4. Two applications with one broker are told each other's ids, as on Redis.
# 5. A worker that runs is told before it gets a task that this program sends afterwards: where
#    mailboxes are polled, tasks are hidden for as long as that takes (`Mailboxes.lag`). Programs
#    that send between a command and that time are one: others do not know of the command.

LONGEST: Final = 200
"""Characters of an id or a stamp; longer ones are not kept."""


def revoked_by(message: Mapping[str, Any]) -> list[str]:
    """The notes of a message that revokes tasks for all workers; [] for any other."""
    kind = message["content-type"]
    try:  # this program has just encoded it: every type may be read
        command = loads(message["body"], kind, message["content-encoding"], accept={kind})
        if command["destination"] or command["pattern"]:
            return []
        method, arguments = command["method"], command["arguments"]
        if method in ("revoke", "terminate"):
            found = [[each] for each in _listed(arguments["task_id"])]
        elif method == "revoke_by_stamped_headers":
            headers = arguments["headers"]
            pairs = (
                headers.items()
                if isinstance(headers, dict)
                else [each.split("=")[:2] for each in headers]
            )
            found = [[header, each] for header, stamps in pairs for each in _listed(stamps)]
        else:
            return []
    except (KombuError, LookupError, TypeError, ValueError, AttributeError):
        return []  # not a command as Celery writes them
    return [json.dumps(each) for each in found if _short(each)]


def _listed(value: Any) -> list[Any]:
    return list(value) if isinstance(value, list | tuple | set) else [value]


def _short(texts: Sequence[Any]) -> bool:
    return all(isinstance(each, str) and len(json.dumps(each)) <= LONGEST for each in texts)


def commands_for(notes: Sequence[str]) -> list[dict[str, Any]]:
    """The commands that tell a worker what the notes say; damaged ones are skipped."""
    ids: list[str] = []
    stamps: dict[str, list[str]] = {}
    for note in notes:
        try:
            found = json.loads(note)
        except ValueError:
            continue
        if not isinstance(found, list) or not all(isinstance(each, str) for each in found):
            continue
        if len(found) == 1:
            ids.append(found[0])
        elif len(found) == 2:
            stamps.setdefault(found[0], []).append(found[1])
    hello = {"method": "hello", "arguments": {"from_node": "earlier commands", "revoked": ids}}
    stamped = {"method": "revoke_by_stamped_headers", "arguments": {"headers": stamps}}
    return [hello] * bool(ids) + [stamped] * bool(stamps)
