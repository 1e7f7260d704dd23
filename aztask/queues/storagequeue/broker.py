"""The Storage queue broker: the broker protocol over ``azure-storage-queue``.

Rules
1. Only `declare` creates queues: the queue itself and ``NAME-poison`` for its dead letters. To
   send, receive and settle, permissions on messages are enough.
2. The service never expires our messages (``time_to_live=-1``): its default of seven days would
   silently delete chained delays and dead letters. The worker checks aztask's own expiry.
3. An ambiguous send is not repeated here: `SendUnconfirmed` carries the messages to send again
   under the same ids.
4. Every message is one request. The requests of a batch run in parallel, over at most `CONNECTIONS`
   connections. Renewals have their own connections, so they wait for nothing else.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Sequence
from typing import Any, Final
from urllib.parse import urlsplit
from weakref import WeakSet

from azure.core.credentials import TokenCredential
from azure.core.exceptions import AzureError
from azure.storage.queue import QueueMessage

from aztask.address.addresses import StorageQueueAddress
from aztask.address.owner import service_name
from aztask.errors import BrokerUnavailable, SendUnconfirmed
from aztask.message.envelope import Envelope
from aztask.queues.base import (
    MessageState,
    Peeked,
    Position,
    QueueOptions,
    QueueStats,
    Receiver,
    ReceiverOptions,
)
from aztask.queues.skeleton import BrokerSkeleton
from aztask.queues.storagequeue.delivery import CONNECTIONS, FailedRequest, QueueRequests
from aztask.queues.storagequeue.errors import Effect, RequestFailure, failure_of
from aztask.queues.storagequeue.inspection import StorageInspector
from aztask.queues.storagequeue.kind import (
    KIND,
    PEEK_LIMIT,
    POISON_SUFFIX,
    poison_name,
)
from aztask.queues.storagequeue.mailboxes import POLL, StorageMailboxes
from aztask.queues.storagequeue.messages import StorageClient
from aztask.queues.storagequeue.receiver import CEILING, Polling, StorageReceiver
from aztask.queues.storagequeue.wire import (
    TEXT_LIMIT,
    read_text,
    text_of,
    whole_seconds,
)
from aztask.support.clock import SYSTEM_CLOCK, Clock
from aztask.support.threadpool import ThreadPool

# -- Puts messages into a Storage queue: one request for each, many of them in parallel.
#
# Rules
# 1. A request that certainly had no effect is retried, for about two seconds. One that may have had
#    an effect is not: a silent repetition would store the message twice.
# 2. The error names the messages that were not confirmed, so that the caller resends only those.

SEND_SECONDS: Final = 10.0
SEND_PAUSES: Final = (0.1, 0.4, 1.0)
MAX_RETRY_AFTER: Final = 2.0
"""Seconds. If the service asks for a longer pause, the caller has to wait and resend."""


class MessageSender:
    """Puts messages into one queue."""

    def __init__(self, requests: QueueRequests, thread_pool: ThreadPool) -> None:
        """thread_pool: for transports that cannot run several requests in parallel."""
        self._requests = requests
        self._thread_pool = thread_pool

    def put_all(self, texts: Sequence[tuple[str, float]]) -> list[RequestFailure | None]:
        """Put messages, each with its delay in seconds; returns the failure of each, or None.

        Crash window: if the process dies, some messages are stored, and the caller does not learn
        which. If they are sent again under the same ids, some are stored twice; with a result store
        each of them still runs once.
        """
        failures = self._put_once(texts)
        for pause in SEND_PAUSES:
            again = [n for n, failure in enumerate(failures) if failure and _is_retryable(failure)]
            if not again:
                break
            self._requests.clock.sleep(max(pause, *(_retry_after(failures[n]) for n in again)))
            tried = self._put_once([texts[n] for n in again])
            for n, failure in zip(again, tried, strict=True):
                failures[n] = failure
        return failures

    def _put_once(self, texts: Sequence[tuple[str, float]]) -> list[RequestFailure | None]:
        if len(texts) > 1:
            failures = self._requests.put_all(texts, SEND_SECONDS)
            if failures is not None:
                return failures
        return self._thread_pool.map(self._put, texts)

    def _put(self, text: tuple[str, float]) -> RequestFailure | None:
        try:
            self._requests.put(*text, SEND_SECONDS)
        except FailedRequest as failed:
            return failed.failure
        return None


def _is_retryable(failure: RequestFailure) -> bool:
    """Whether a retry within this call may succeed and cannot store the message twice."""
    return failure.effect is Effect.NONE and _retry_after(failure) <= MAX_RETRY_AFTER


def _retry_after(failure: RequestFailure | None) -> float:
    """The pause in seconds that the service asks for; 0 without one."""
    return getattr(failure.error, "retry_after", None) or 0.0 if failure else 0.0


def judge(
    queue: str, envelopes: Sequence[Envelope], failures: Sequence[RequestFailure | None]
) -> None:
    """Raise the error for a batch with these failures, if any; see `Broker.send`."""
    failed = [(envelope, each) for envelope, each in zip(envelopes, failures, strict=True) if each]
    if not failed:
        return
    error = failed[0][1].error
    unsure = sum(each.effect is Effect.UNSURE for _, each in failed)
    if not unsure and len(failed) == len(envelopes):
        raise error
    raise SendUnconfirmed(
        f"{len(failed)} of {len(envelopes)} messages for queue {queue!r} were not confirmed "
        f"({error}); send those again under the same ids",
        [envelope for envelope, _ in failed],
    ) from (error if isinstance(error, BrokerUnavailable) else None)


RENEWERS: Final = 64
MAILBOX_LEASE: Final = 60.0
MANAGE_SECONDS: Final = 30.0
READ_SECONDS: Final = 10.0


class StorageQueueBroker(BrokerSkeleton):
    """The queues of a storage account. Any thread may call; a forked child makes its own."""

    title = "Storage queue"

    def __init__(
        self,
        address: StorageQueueAddress,
        *,
        poll_ceiling: float = CEILING,
        credential: TokenCredential | None = None,
        clock: Clock = SYSTEM_CLOCK,
    ) -> None:
        """Make a broker; nothing connects before the first call.

        poll_ceiling: the longest pause between two polls of an empty queue, seconds.
        credential: replaces azure-identity's default.
        clock: injected in tests.
        """
        super().__init__(KIND)
        self._client = StorageClient(address, credential=credential, clock=clock)
        self._address = address
        self._poll_ceiling = poll_ceiling
        self._clock = clock
        self._workers = ThreadPool("storage", CONNECTIONS)
        self._renewers = ThreadPool("renewals", RENEWERS)
        self._pollings: dict[str, WeakSet[Polling]] = {}
        self._lock = threading.Lock()

    @property
    def identity(self) -> str:
        """The broker's name for `aztask.address.owner`."""
        return service_name(self._address)

    @property
    def server(self) -> tuple[str, int | None]:
        """The account's host name, and the port if the address names one."""
        parts = urlsplit(self._address.endpoint)
        return parts.hostname or "", parts.port

    # -- queues ------------------------------------------------------------------------------

    def _declare(self, queue: str, options: QueueOptions) -> None:
        """Its dead-letter queue too. A Storage queue has no lease: each receive sets its own."""
        for name in (queue, poison_name(queue)):
            self._create(name)

    def _create(self, name: str) -> None:
        try:
            self._client.queue(name).create_queue(read_timeout=MANAGE_SECONDS)
        except AzureError as error:
            failure = failure_of(error, name)
            if failure.code != "QueueAlreadyExists":
                raise failure.error from None

    def _delete(self, queue: str) -> None:
        try:
            self._client.queue(queue).delete_queue(read_timeout=MANAGE_SECONDS)
        except AzureError as error:
            raise failure_of(error, queue).error from None
        self._if_there(poison_name(queue), "delete_queue")

    def _names(self) -> list[str]:
        """A queue whose name has 57 characters or more is foreign. So is ``NAME-poison`` without a
        queue ``NAME``.
        """
        try:
            names = {str(each.name) for each in self._client.service.list_queues()}
        except AzureError as error:
            raise failure_of(error, None).error from None
        return [name for name in names if name.removesuffix(POISON_SUFFIX) not in names - {name}]

    def _stats(self, queue: str) -> QueueStats:
        """The approximate number of all messages: the service does not count them by state."""
        total = self._count(queue)
        dead = self._if_there(poison_name(queue), "get_queue_properties")
        return QueueStats(
            queue,
            active=None,
            leased=None,
            scheduled=None,
            deferred=None,
            dead=int(dead.approximate_message_count or 0) if dead else 0,
            total=total,
        )

    def _count(self, name: str) -> int:
        try:
            properties = self._client.queue(name).get_queue_properties(read_timeout=READ_SECONDS)
        except AzureError as error:
            raise failure_of(error, name).error from None
        return int(properties.approximate_message_count or 0)

    def _if_there(self, name: str, call: str) -> Any:
        """The result of the queue client's method `call`; None if there is no such queue."""
        try:
            return getattr(self._client.queue(name), call)(read_timeout=MANAGE_SECONDS)
        except AzureError as error:
            failure = failure_of(error, name)
            if failure.code == "QueueNotFound":
                return None
            raise failure.error from None

    def _peek(
        self, queue: str, dead_letter: bool, after: Position | None, limit: int
    ) -> list[Peeked]:
        """The first messages that could be received now. The service shows at most 32."""
        name = poison_name(queue) if dead_letter else queue
        try:
            messages = self._client.queue(name).peek_messages(
                max_messages=max(1, min(limit, PEEK_LIMIT)), read_timeout=READ_SECONDS
            )
        except AzureError as error:
            failure = failure_of(error, name)
            if failure.code == "QueueNotFound" and dead_letter and self._count(queue) >= 0:
                return []
            raise failure.error from None
        return [_peeked(message) for message in messages]

    def _purge(self, queue: str, dead_letter: bool) -> int:
        """Leased and delayed ones too; returns approximately how many."""
        if dead_letter:
            stats = self._stats(queue)
            if stats.dead:
                self._if_there(poison_name(queue), "clear_messages")
            return stats.dead or 0
        count = self._count(queue)
        self._if_there(queue, "clear_messages")
        return count

    # -- messages ----------------------------------------------------------------------------

    def send(self, queue: str, envelopes: Sequence[Envelope]) -> None:
        """Store all envelopes. They are sent in parallel, so their order is not guaranteed.

        A request that certainly had no effect is retried, for about two seconds.
        """
        self._usable_for(queue)
        texts = [(self._text(envelope), envelope.delay) for envelope in envelopes]
        if not texts:
            return
        requests = QueueRequests(queue, self._client.messages(queue), self._clock)
        failures = MessageSender(requests, self._workers).put_all(texts)
        for polling in self._waiting(queue):
            polling.notify()
        judge(queue, envelopes, failures)

    def check(self, envelope: Envelope, *, reserve: int = 0) -> None:
        """Refuse an envelope that could not replace its message's content; see `Broker.check`."""
        text_of(envelope, limit=TEXT_LIMIT - math.ceil(reserve / 3) * 4)

    @staticmethod
    def _text(envelope: Envelope) -> str:
        whole_seconds(envelope.delay)  # raises if the delay is invalid
        return text_of(envelope, delay=envelope.delay or None)

    def _receiver(self, options: ReceiverOptions, poll_ceiling: float | None) -> Receiver:
        polling = Polling(poll_ceiling or self._poll_ceiling, clock=self._clock)
        if not options.dead_letter:
            with self._lock:
                self._pollings.setdefault(options.queue, WeakSet()).add(polling)
        return StorageReceiver(
            self._client,
            options,
            polling,
            clock=self._clock,
            workers=self._workers,
            renewers=self._renewers,
        )

    def mailboxes(self) -> StorageMailboxes:
        """The mailboxes of this account; see the module `mailboxes` for cost and permissions."""
        self._usable()

        def receiver(queue: str, delete: bool) -> Receiver:
            return self.receiver(queue, lease=MAILBOX_LEASE, delete=delete, poll_ceiling=POLL)

        return StorageMailboxes(self._client, self._clock, self.send, receiver)

    def inspector(self) -> StorageInspector:
        """The inspector that ``aztask doctor`` and a starting worker use."""
        self._usable()
        return StorageInspector(self._client)

    def _close(self) -> None:
        for queue in list(self._pollings):
            for polling in self._waiting(queue):
                polling.close()
        self._workers.close()
        self._renewers.close()
        self._client.close()

    def _waiting(self, queue: str) -> list[Polling]:
        """The pollings of this process's receivers of the queue."""
        with self._lock:
            return list(self._pollings.get(queue, ()))


def _peeked(message: QueueMessage) -> Peeked:
    written = read_text(message.content)
    dead = written.dead
    put_at = message.inserted_on.timestamp() if message.inserted_on else 0.0
    return Peeked(
        written.envelope,
        str(message.id),
        MessageState.ACTIVE,
        int(message.dequeue_count or 0),
        put_at,
        None,
        dead.reason if dead else None,
        dead.description if dead else None,
    )
