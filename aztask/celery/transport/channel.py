"""The Kombu channel: consuming and settling over a broker; `RoutingChannel` publishes.

Rules: publishing and settling are safe from any thread; delivering belongs to one thread, as in
Kombu, and receiving to that one or another (`aztask.celery.transport.looped`). More:
`aztask.celery.transport`.
"""

from __future__ import annotations

import logging
import os
import threading
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import replace
from functools import partial
from itertools import chain, count
from time import time
from typing import Any, Final

from kombu.transport import base

from aztask.celery.transport.boxes import Pump
from aztask.celery.transport.consumers import Accepted, MailboxConsumer, QueueConsumer, source_of
from aztask.celery.transport.options import nothing
from aztask.celery.transport.routing import (
    HELD_SECONDS,
    LONGEST_DELAY,
    ChannelConnection,
    RoutingChannel,
    seconds_early,
    to_message,
)
from aztask.celery.transport.unacked import EarlyMessages, Unacked, UnackedDelivery
from aztask.errors import AztaskError, CodecError
from aztask.message.envelope import Envelope
from aztask.message.message import next_link
from aztask.queues.base import EXCHANGE, ROUTING_KEY, Peeked
from aztask.retry import EXPIRED, UNDECODABLE
from aztask.settlement import (
    Abandon,
    Complete,
    DeadLetter,
    Release,
    Resubmit,
    Settlement,
    moved_dead_letter,
)
from aztask.support.display import one_line

logger = logging.getLogger(__name__)

REJECTED: Final = "rejected"

BATCH: Final = 32
"""Messages that one request may fetch, unless the prefetch count is lower."""

PART: Final = "\0"
"""What follows it in a tag is ours: the number of one of several queues of a consumer."""

_REMOTE_WAIT = 1.0


def _own_tag(consumer_tag: str) -> str:
    """The tag that the program gave."""
    return consumer_tag.partition(PART)[0]


class Channel(RoutingChannel):
    """The channel of producers and consumers. Any thread may publish and settle."""

    Message = base.Message
    do_restore = False

    def __init__(self, connection: ChannelConnection, **kwargs: Any) -> None:
        super().__init__(connection, **kwargs)
        self.no_ack_consumers: set[str] = set()
        self._sources: dict[str, QueueConsumer] = {}
        self._getters: dict[tuple[str, bool], list[QueueConsumer]] = {}
        self._retired: list[QueueConsumer] = []
        self._pumps: dict[str, Pump] = {}
        self._feeding: set[str] = set()
        self.commands: set[str] = set()  # mailboxes that are emptied before tasks are delivered
        self._command_lock = threading.Lock()  # what a thread takes of these is in `_ready` then
        self._ending: SystemExit | None = None
        self._ready: deque[UnackedDelivery] = deque()
        self._ready_lock = threading.Lock()  # a message goes to `_ready` or its consumer is gone
        self._early = EarlyMessages()
        self._unacked: Unacked | None = None
        self._prefetch = 0
        self._tags = count(1)
        self._pid = os.getpid()

    # -- consumers ---------------------------------------------------------------------------

    def basic_qos(
        self, prefetch_size: int = 0, prefetch_count: int = 0, apply_global: bool = False
    ) -> None:
        """Allow at most `prefetch_count` unacknowledged messages on this channel; 0: no limit."""
        self._prefetch = prefetch_count or 0
        self.link.changes.note()

    def basic_consume(
        self,
        queue: str,
        no_ack: bool,
        callback: Callable[[Any], Any],
        consumer_tag: str,
        **_: Any,
    ) -> None:
        """Deliver messages of `queue` to `callback`; with `no_ack` they are deleted at receipt."""
        self._declare_undecided(queue)
        if no_ack:
            self.no_ack_consumers.add(consumer_tag)
        served = self.link.least_served()
        for source in self._sources_for(queue, no_ack, consumer_tag, callback):
            source.served = served
            for command in self.link.boxes.revoked(queue):
                self._tell(source, command)
            self._add(source.consumer_tag, source)
        self.link.consuming()

    def _tell(self, source: QueueConsumer, command: dict[str, Any]) -> None:
        """Deliver a command that no other program has sent."""
        message = self.Message(
            b"", delivery_tag=next(self._tags), channel=self, content_type="application/json",
            content_encoding="utf-8", delivery_info={}, properties={}, headers={},
        )  # fmt: skip
        message._decoded_cache = command
        source.callback(message)

    def served(self) -> list[float]:
        """What its consumers of queues have had, see `QueueConsumer`; mailboxes are not counted."""
        return [each.served for each in self.task_sources()]

    def _add(self, tag: str, source: QueueConsumer) -> None:
        """Receive for a consumer from now on, on a thread if it is a mailbox that needs one.

        The draining thread should not wait at such a mailbox, or could be late.
        """
        queue, pump = source.source.queue, None
        control, remote = self.link.boxes.is_control(queue), self.link.broker.capabilities.remote
        # In an event loop, the loop's thread runs the commands: it does not stand still, and only
        # this thread may change Celery's pool.
        if isinstance(source, MailboxConsumer) and (control or remote or self.link.looped):
            serves = control and not self.link.looped
            pump = Pump(partial(self._serve if serves else self._pump, source), queue)
            if not serves:
                self._feeding.add(tag)
                if control and not remote:  # no network keeps the order of two queues
                    self.commands.add(tag)
            self._pumps[tag] = pump
        self._sources[tag] = source  # after its pump, or the draining thread would receive, too
        if pump is not None:
            pump.start()

    def enter_loop(self) -> None:
        """An event loop delivers from now on: have it run the commands, too."""
        for tag, source in list(self._sources.items()):
            if isinstance(source, MailboxConsumer):
                if (pump := self._pumps.get(tag)) is not None:
                    pump.stop()
                self._add(tag, source)
        if self._sources:
            self.link.consuming()

    def _pump(self, source: MailboxConsumer, wait: float) -> None:
        """On a pump's thread: receive, so that the draining thread delivers."""
        if source.consumer_tag not in self.commands:
            arrived = self.fetch(source, wait)
        elif arrived := source.await_message(wait):
            with self._command_lock:
                arrived = self.fetch(source, 0.0)
        if arrived:
            self.link.arrived()

    def fetch_commands(self) -> None:
        """Receive the commands that are there.

        Never raises: if there is a command, the pump meets the error too, logs it and goes on.
        """
        for tag in list(self.commands):
            with self._command_lock, suppress(Exception):
                source = self._sources.get(tag)
                if isinstance(source, MailboxConsumer) and source.has_news():
                    while self.fetch(source, 0.0):
                        pass

    def _serve(self, source: QueueConsumer, wait: float) -> None:
        """On a pump's thread: receive a command for this process, and run it here.

        The draining thread may stand still for as long as a task takes: Celery's blocking loop
        waits there for a free process of the pool. A command that ends the process is passed on
        to that thread.
        """
        for holding in self._receive(source, wait, 1):
            try:
                self._hand_out(source, holding)
            except SystemExit as stop:
                self._ending = stop
                self.link.arrived()

    def basic_cancel(self, consumer_tag: str) -> None:
        """Stop the consumer; messages that were received but not delivered are given back."""
        for tag in [each for each in self._sources if _own_tag(each) == consumer_tag]:
            self._cancel(tag)

    def _cancel(self, consumer_tag: str) -> None:
        source = self._sources.pop(consumer_tag, None)
        if source is None:
            return
        self._feeding.discard(consumer_tag)
        self.commands.discard(consumer_tag)
        pump = self._pumps.pop(consumer_tag, None)
        if pump is not None:
            pump.stop()
        with self._ready_lock:
            mine = [holding for holding in self._ready if holding.consumer_tag == consumer_tag]
            for holding in mine:
                self._ready.remove(holding)
        self.link.changes.note()
        self._return(source, [*mine, *self._early.take(consumer_tag)])
        # Messages already delivered must still be settled through this receiver.
        self._retired.append(source)

    def basic_get(self, queue: str, no_ack: bool = False, **_: Any) -> Any:
        """Receive one message, or None if there is none."""
        found: list[Any] = []
        key = (queue, bool(no_ack))
        if key not in self._getters:
            self._getters[key] = self._sources_for(queue, no_ack, "", nothing)
        remote = self.link.broker.capabilities.remote
        wait = _REMOTE_WAIT if remote else 0.0
        for source in self._getters[key]:  # the most urgent first
            source.callback = found.append
            # Past `_ready`, to which another thread may add a consumer's message in between.
            while not found and (holdings := self._receive(source, wait, 1)):
                self._hand_out(source, holdings[0])
        return found[0] if found else None

    def basic_ack(self, delivery_tag: int, multiple: bool = False) -> None:
        """Complete the message; with `multiple`, all messages delivered before it, too.

        On a remote broker this happens in the background: see
        `aztask.celery.transport.unacked`.
        """
        tags = self.unacked.tags_up_to(delivery_tag) if multiple else [delivery_tag]
        for tag in tags:
            self._settle(tag, Complete())

    def basic_reject(self, delivery_tag: int, requeue: bool = False) -> None:
        """Dead-letter the message, or with `requeue` make it available again at once."""
        self._settle(
            delivery_tag,
            Abandon() if requeue else DeadLetter(REJECTED, "a consumer rejected the message"),
        )

    def basic_recover(self, requeue: bool = False) -> None:
        """Give back all messages that were delivered and not acknowledged."""
        self.unacked.give_back(self.unacked.tags_up_to(next(self._tags)), Abandon())

    # -- receiving ---------------------------------------------------------------------------

    @property
    def unacked(self) -> Unacked:
        """The messages that were delivered and not settled."""
        self._notice_fork()
        if self._unacked is None:
            remote = self.link.broker.capabilities.remote
            self._unacked = Unacked(self.link.keeper, self.link.changes, remote=remote)
        return self._unacked

    def _settle(self, tag: int, settlement: Settlement) -> None:
        """Settle a message; an event loop does not wait for the network."""
        self.unacked.settle(tag, settlement, background=self.link.looped)

    @property
    def delivered(self) -> bool:
        """True if every message that was received has been delivered, or is held until its time."""
        return not self._ready

    @property
    def scarce(self) -> bool:
        """True if the prefetch count leaves room for less than three quarters of it."""
        return bool(self._prefetch) and 4 * self.room < 3 * self._prefetch

    @property
    def room(self) -> int:
        """How many more messages the prefetch count allows; 0 if it sets no limit."""
        return max(0, self._prefetch - self._handed_out()) if self._prefetch else 0

    def open_sources(self) -> Iterator[QueueConsumer]:
        """The consumers that may receive now, as far as the prefetch count allows.

        A consumer of a queue with sessions waits until its message is settled.
        """
        full = self._prefetch and self._handed_out() >= self._prefetch
        if not full and not self.unacked.crowded:
            for tag, source in list(self._sources.items()):
                if tag not in self._pumps and not self._holds_session(source):
                    yield source

    def _holds_session(self, source: QueueConsumer) -> bool:
        """True if the next message of the consumer's session waits for the one before it."""
        return source.source.sessions and self.unacked.holds(source.receiver)

    def _handed_out(self) -> int:
        """How many messages count for the prefetch count."""
        return len(self.unacked) - len(self._early)

    def seconds_to_due(self) -> float | None:
        """Seconds until a message that is held until its time is due; None without one."""
        return self._early.seconds(time()) if self._early else None

    @property
    def may_wake(self) -> bool:
        """True if another thread may give the draining thread something to do.

        It receives a mailbox's message, or settles a message whose session has more.
        """
        feeding = bool(self._feeding) and not self.link.looped  # there it rings
        return feeding or any(map(self._holds_session, list(self._sources.values())))

    def deliver_one(self) -> bool:
        """Deliver one message that was received before; False if there was none.

        Raises SystemExit if a command that was received on another thread ends the process.
        """
        self._notice_fork()
        if self._ending is not None:
            ending, self._ending = self._ending, None
            raise ending
        if self._early:
            self._ready.extendleft(reversed(self._early.due(time())))
        while self._ready:
            holding = self._ready.popleft()
            if not self._ready:
                self.link.changes.note()  # more may be received while this one is handled
            if holding.lapsed():
                self.unacked.drop(holding)
                continue
            source = self._sources.get(holding.consumer_tag)
            if source is None:
                self._settle(holding.tag, Release())
            elif self._hand_out(source, holding):
                return True
        return False

    def fetch(self, source: QueueConsumer, wait: float) -> bool:
        """Receive from `source`, waiting at most `wait` seconds; True if any message came.

        What comes after the consumer was cancelled is given back. Commands that were sent before a
        task that has come are received before it is delivered.
        """
        holdings = self._receive(source, wait, BATCH)
        if holdings and not isinstance(source, MailboxConsumer):
            self.link.fetch_commands()
        with self._ready_lock:
            wanted = self._sources.get(source.consumer_tag) is source
            if wanted:
                self._ready.extend(holdings)
        if not wanted:
            self._return(source, holdings)
        return wanted and bool(holdings)

    def _return(self, source: QueueConsumer, holdings: list[UnackedDelivery]) -> None:
        """Give back messages that were received for a consumer and not delivered; never raises.

        One that was deleted at receipt is sent again. One of a mailbox is dropped with it.
        """
        self.unacked.give_back([holding.tag for holding in holdings if holding.lease], Release())
        lost = [holding.delivery for holding in holdings if holding.lease is None]
        if not lost or isinstance(source, MailboxConsumer):
            return
        try:
            self.link.broker.send(source.source.address, [each.envelope for each in lost])
        except AztaskError as error:
            logger.error(
                "lost %d messages of queue %s, which were received with no_ack by a consumer that"
                " was cancelled, and could not be sent again: %s", len(lost), source.source.queue,
                error,
            )  # fmt: skip

    def _receive(self, source: QueueConsumer, wait: float, limit: int) -> list[UnackedDelivery]:
        if self._prefetch and source.consumer_tag:
            limit = min(limit, self._prefetch - self._handed_out())
            if limit < 1:  # a held message has become due since the consumer was chosen
                return []
        if source.no_ack:
            limit = 1  # a message deleted at receipt and not delivered would be lost
        if self._holds_session(source):
            return []
        deliveries = source.receive(limit, wait)
        holdings = [
            UnackedDelivery(next(self._tags), source.receiver, delivery, source.consumer_tag)
            for delivery in deliveries
        ]
        if not source.no_ack:
            self.unacked.hold(source.receiver, holdings, source.source.lease)
        return holdings

    def _sources_for(
        self, queue: str, no_ack: bool, consumer_tag: str, callback: Callable[[Any], Any]
    ) -> list[QueueConsumer]:
        """A consumer of the queue, or one for each of its priorities, the most urgent first."""
        broker, boxes = self.link.broker, self.link.boxes
        accepted = Accepted.by(callback, self.link.options.accept)
        if boxes.has(queue):
            return [
                MailboxConsumer(
                    boxes,
                    broker,
                    queue,
                    no_ack=bool(no_ack),
                    consumer_tag=consumer_tag,
                    callback=callback,
                    accepted=accepted,
                )
            ]
        options = self.link.options
        return [
            QueueConsumer(
                broker,
                source_of(broker, options, queue, address),
                no_ack=bool(no_ack),
                consumer_tag=f"{consumer_tag}{PART}{number}" if number else consumer_tag,
                callback=callback,
                accepted=accepted,
                weight=weight,
            )
            for number, (address, weight) in enumerate(options.queues_of(self.link.address(queue)))
        ]

    def _hand_out(self, source: QueueConsumer, holding: UnackedDelivery) -> bool:
        """Deliver one message to its consumer, unless no consumer may get it now."""
        delivery, now = holding.delivery, time()
        early = seconds_early(delivery.envelope, now)
        if (
            early
            and early <= HELD_SECONDS
            and source.consumer_tag
            and self._early.hold(holding, now + early)
        ):
            self.link.changes.note()  # it no longer counts for the prefetch count
            return False
        verdict = self._judge(source, delivery.envelope, now, early)
        if not isinstance(verdict, dict):
            self._keep_back(holding, verdict)
            return False
        source.callback(self._message(source, verdict, delivery.delivery_count, holding.tag))
        return True

    def _message(
        self, source: QueueConsumer, fields: dict[str, Any], count: int, tag: int | None
    ) -> Any:
        """Kombu's message of what `_judge` has let pass.

        count: how often it was delivered. tag: None for one that was only peeked at.
        """
        headers = fields["headers"]
        info = {
            "exchange": headers.pop(EXCHANGE, ""),
            "routing_key": headers.pop(ROUTING_KEY, source.source.queue),
            "consumer_tag": _own_tag(source.consumer_tag),
            "redelivered": count > 1,
            "delivery_count": count,
        }
        fields["properties"].update(delivery_tag=tag, delivery_info=info)
        content = fields.pop("content")
        message = self.Message(delivery_tag=tag, delivery_info=info, channel=self, **fields)
        accepted = source.accepted
        if accepted.consumer is not None and message.content_type not in accepted.further:
            message._decoded_cache = content  # what Kombu would decode for it, once
        return message

    def task_sources(self) -> list[QueueConsumer]:
        """Its consumers of queues, without those of mailboxes."""
        found = list(self._sources.values())
        return [each for each in found if not isinstance(each, MailboxConsumer)]

    def waiting(self, source: QueueConsumer, peeked: Peeked, now: float) -> Any:
        """Kombu's message of a task that waits for its eta, to read it only; None for any other.

        peeked: a message of the consumer's queue. now: UTC epoch seconds.
        """
        envelope = peeked.envelope
        if "task" not in envelope.headers or not seconds_early(envelope, now):
            return None
        fields = self._judge(source, envelope, now, None)
        if not isinstance(fields, dict):
            return None
        message = self._message(source, fields, peeked.delivery_count, None)
        if source.accepted.consumer is not None:  # which sets this when it gets a message
            message.accept = source.accepted.consumer.accept
        return message

    def _judge(
        self, source: QueueConsumer, envelope: Envelope, now: float, early: float | None
    ) -> dict[str, Any] | Settlement:
        """The arguments of Kombu's Message, or the settlement if it must not be delivered.

        Beside these arguments is ``content``, the decoded body; None if it was not decoded.

        early: seconds until its eta, None if it has none.
        """
        if (dead := moved_dead_letter(envelope)) is not None:
            return dead
        if early:
            lead = self.link.broker.capabilities.lead
            delay = min(LONGEST_DELAY, max(0.1, early - lead))
            clone = replace(envelope, message_id=next_link(envelope), delay=delay)
            return Resubmit(delay, counted=False, envelope=clone)
        # Celery's messages carry the expiry as a header, too: Celery records them as revoked.
        expires_at = envelope.expires_at
        if expires_at is not None and expires_at <= now and not envelope.headers.get("expires"):
            return DeadLetter(EXPIRED, "its expiry had passed when a consumer received it")
        try:
            fields = to_message(envelope, self.link.options.limits)
            source.accepted.check(fields["content_type"])
            fields["content"] = self.link.decoded(fields["body"], fields["content_type"])
        except CodecError as error:
            return DeadLetter(UNDECODABLE, one_line(f"{type(error).__name__}: {error}", 1000))
        # Its time has come. An event loop's timer starts it at once and leaves the eta to the task;
        # the thread that is the timer of Celery's blocking loop would start it up to a second late.
        if early is not None and "task" in envelope.headers and not self.link.looped:
            del fields["headers"]["eta"]
        return fields

    def _keep_back(self, holding: UnackedDelivery, settlement: Settlement) -> None:
        """Settle a message that is not delivered to any consumer.

        A message that was deleted at receipt cannot be settled: an early one is sent again. What
        no consumer will get is logged.
        """
        envelope = holding.delivery.envelope
        if holding.lease is not None:
            if isinstance(settlement, DeadLetter):
                logger.warning(
                    "message %s of queue %s is not delivered but dead-lettered (%s): %s",
                    one_line(envelope.message_id, 100) or "without an id",
                    holding.delivery.queue,
                    settlement.reason,
                    settlement.description,
                )
            self._settle(holding.tag, settlement)
        elif isinstance(settlement, Resubmit) and settlement.envelope is not None:
            self.link.broker.send(holding.delivery.queue, [settlement.envelope])
        else:
            logger.warning(
                "dropped message %s, received with no_ack: %s", envelope.message_id, settlement
            )

    def close(self) -> None:
        """Cancel the consumers and give back the messages they have not acknowledged."""
        if not self.closed:
            self._notice_fork()
            for tag in list(self._sources):
                self._cancel(tag)
            if self._unacked is not None:
                self.basic_recover(requeue=True)
                self._unacked.close()
            for source in (*self._retired, *chain.from_iterable(self._getters.values())):
                source.close()
            for queue in self.mailboxes:
                self.link.boxes.delete(queue)
        super().close()

    def _notice_fork(self) -> None:
        """In a child, forget the parent's messages, and receive through a broker of its own."""
        if self._pid != os.getpid():
            self._pid = os.getpid()
            self._ready.clear()
            self._early.clear()
            self._unacked = None
            self._retired.clear()
            self._getters.clear()
            self._pumps.clear()
            self._feeding.clear()
            self.commands.clear()
            self._ready_lock, self._command_lock = threading.Lock(), threading.Lock()
            self.mailboxes.clear()
            for tag, source in list(self._sources.items()):
                if isinstance(source, MailboxConsumer):
                    del self._sources[tag]
                else:
                    source.reopen(self.link.broker)
