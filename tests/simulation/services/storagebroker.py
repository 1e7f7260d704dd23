"""The real Storage queue broker over the modelled service.

All of the adapter runs: polling, pop receipts, renewals in doubt, settlements that are repeated,
chained delays, dead letters. Replaced are the requests themselves, which are built as HTTP, and the
thread pools. Renewals are posted: their answers may come late, out of order, or never, while the
program goes on.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime
from email.utils import formatdate
from functools import partial, wraps
from types import SimpleNamespace
from typing import Any, Final

from azure.core.exceptions import AzureError, ServiceRequestError

from aztask.address.addresses import StorageQueueAddress
from aztask.queues.storagequeue import settling
from aztask.queues.storagequeue.broker import StorageQueueBroker
from aztask.queues.storagequeue.messages import QueueMessages, ReceivedMessage, StorageClient
from aztask.support.display import Secret

from .azureerrors import ask
from .inline import PostingPool, replaced
from .storagequeues import Received, StorageQueues
from .wire import Line, Pending, Service

DEFAULT_READ: Final = 60.0
"""Seconds that the SDK's own client waits for an answer, where the adapter sets nothing."""

ADDRESS: Final = StorageQueueAddress("simulated", "https://simulated", Secret("a2V5a2V5a2V5"))


class ModelMessages(QueueMessages):
    """The messages of one queue: the requests that the adapter builds itself."""

    def __init__(self, service: StorageQueues, line: Line, queue: str) -> None:
        self._service = service
        self._line = line
        self._queue = queue

    def put(self, text: str, delay: int, *, seconds: float) -> None:
        """See `QueueMessages.put`."""
        self._ask("put", lambda: self._service.put(self._queue, text, delay), seconds)

    def put_all(
        self, texts: Sequence[tuple[str, int]], *, connections: int, seconds: float
    ) -> list[AzureError | None]:
        """See `QueueMessages.put_all`."""
        return [_error_of(partial(self.put, *text, seconds=seconds)) for text in texts]

    def receive(
        self, limit: int, hidden: int, *, seconds: float
    ) -> tuple[list[ReceivedMessage], Mapping[str, str]]:
        """See `QueueMessages.receive`."""

        def execute() -> tuple[list[Received], float]:
            return self._service.receive(self._queue, limit, hidden), self._service.clock.wall()

        found, at = self._ask("receive", execute, seconds)
        messages = [
            ReceivedMessage(each.name, each.receipt, each.count, each.put_at, each.text)
            for each in found
        ]
        return messages, {"Date": formatdate(int(at), usegmt=True)}

    def update(
        self, message: str, receipt: str, delay: int, text: str | None, *, seconds: float
    ) -> str:
        """See `QueueMessages.update`."""
        return str(
            self._ask(
                "update",
                lambda: self._service.update(self._queue, message, receipt, delay, text),
                seconds,
            )
        )

    def delete(self, message: str, receipt: str, *, seconds: float) -> None:
        """See `QueueMessages.delete`."""
        self._ask("delete", lambda: self._service.delete(self._queue, message, receipt), seconds)

    def delete_all(
        self,
        leases: Sequence[tuple[str, str, Callable[[], bool]]],
        *,
        connections: int,
        seconds: float,
    ) -> list[AzureError | None]:
        """See `QueueMessages.delete_all`."""

        def delete(message: str, receipt: str, late: Callable[[], bool]) -> None:
            if late():
                raise ServiceRequestError("its time-out passed before it could be sent")
            self.delete(message, receipt, seconds=seconds)

        return [_error_of(partial(delete, *lease)) for lease in leases]

    def _ask(self, operation: str, execute: Callable[[], Any], seconds: float) -> Any:
        return ask(self._line, Service.QUEUES, operation, execute, self._queue, seconds)


def _error_of(call: Callable[[], None]) -> AzureError | None:
    try:
        call()
    except AzureError as error:
        return error
    return None


class ModelQueue:
    """The SDK's client of one queue, as far as the adapter uses it."""

    def __init__(self, service: StorageQueues, line: Line, queue: str) -> None:
        self._service = service
        self._line = line
        self._queue = queue

    def create_queue(self, metadata: Mapping[str, str] | None = None, **options: Any) -> None:
        self._ask("create", lambda: self._service.create(self._queue, metadata or {}), options)

    def delete_queue(self, **options: Any) -> None:
        self._ask("delete queue", lambda: self._service.delete_queue(self._queue), options)

    def set_queue_metadata(self, metadata: Mapping[str, str], **options: Any) -> None:
        self._ask("metadata", lambda: self._service.set_metadata(self._queue, metadata), options)

    def get_queue_properties(self, **options: Any) -> Any:
        found = self._ask("properties", lambda: self._service.count(self._queue), options)
        return SimpleNamespace(approximate_message_count=found)

    def clear_messages(self, **options: Any) -> None:
        self._ask("clear", lambda: self._service.clear(self._queue), options)

    def peek_messages(self, max_messages: int, **options: Any) -> list[Any]:
        found = self._ask("peek", lambda: self._service.peek(self._queue, max_messages), options)
        return [
            SimpleNamespace(
                id=each.name,
                content=each.text,
                inserted_on=datetime.fromtimestamp(each.put_at, UTC),
                dequeue_count=each.count,
            )
            for each in found
        ]

    def _ask(self, operation: str, execute: Callable[[], Any], options: Mapping[str, Any]) -> Any:
        patience = options.get("read_timeout", DEFAULT_READ)
        return ask(self._line, Service.QUEUES, operation, execute, self._queue, patience)


class ModelClient(StorageClient):
    """The adapter's client of the account. It learns the service's time as the real one does."""

    def __init__(self, service: StorageQueues, line: Line) -> None:
        self.address = ADDRESS
        self._model = service
        self._line = line
        self._clock = line.clock
        self._offset = 0.0

    @property
    def service(self) -> Any:
        """The SDK's client for requests that concern the account."""
        return SimpleNamespace(list_queues=self._list_queues)

    def _list_queues(self, name_starts_with: str = "", **options: Any) -> list[Any]:
        found = ask(
            self._line,
            Service.QUEUES,
            "list",
            lambda: self._model.listed(name_starts_with),
            "",
            options.get("read_timeout", DEFAULT_READ),
        )
        return [SimpleNamespace(name=name, metadata=metadata) for name, metadata in found]

    def queue(self, name: str) -> Any:
        return ModelQueue(self._model, self._line, name)

    def messages(self, name: str) -> QueueMessages:
        return ModelMessages(self._model, self._line, name)

    def close(self) -> None:
        """There are no connections."""


def storage_queue_broker(
    service: StorageQueues, line: Line, *, poll_ceiling: float = 1.0
) -> StorageQueueBroker:
    """A real broker of one program, on its clock."""
    broker = StorageQueueBroker(ADDRESS, poll_ceiling=poll_ceiling, clock=line.clock)
    broker._client = ModelClient(service, line)
    broker._workers = replaced(broker._workers)
    broker._renewers.close()
    broker._renewers = PostingPool("renewals", line)
    return broker


def _wait_for_models(original: Callable[..., Any]) -> Callable[..., Any]:
    """`concurrent.futures.wait`, which for the renewals of a line waits on the world's time."""

    @wraps(original)
    def wait(futures: Sequence[Any], timeout: float, return_when: str) -> Any:
        if not futures or not isinstance(futures[0], Pending):
            return original(futures, timeout, return_when)
        return futures[0].line.wait(futures, timeout)

    return wait


_settling: Any = settling
_settling.wait = _wait_for_models(_settling.wait)
