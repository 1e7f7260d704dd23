"""What a Storage queue is like, and what may be done with it.

Rules
1. Reading a queue's properties needs a right of its own, which a worker does without: where it is
   missing, the queue is unread.
2. The rights to update and to delete are tried on a message that does not exist: the service
   judges the right before it looks for the message. Getting and adding cannot be tried without
   doing it: a signature says whether it allows them, and otherwise they stay unknown.
"""

from __future__ import annotations

import time
import uuid
from collections.abc import Callable
from datetime import datetime
from typing import Any, Final
from urllib.parse import parse_qs

from azure.core.exceptions import AzureError

from aztask.address.addresses import StorageQueueAddress
from aztask.brokers.inspection import QueueFacts, Right
from aztask.brokers.storagequeue.client import StorageClient
from aztask.brokers.storagequeue.errors import failure_of
from aztask.brokers.storagequeue.names import check_name, poison_name
from aztask.errors import BrokerUnavailable, ConfigurationError
from aztask.support.finding import Finding, fine, problem, warning

SECONDS: Final = 10.0
RECEIPT: Final = "AgAAAAMAAAAAAAAAAAAAAAAAAAA="
"""It has the form of a pop receipt, and belongs to no message."""

SOON: Final = 7 * 86400.0
EXPIRY: Final = "signature"
_LETTERS: Final = (("get", "p"), ("add", "a"))


class StorageInspector:
    """Looks at the queues of an account."""

    def __init__(self, client: StorageClient) -> None:
        self._client = client
        self._learned = False

    def facts(self, queue: str) -> QueueFacts:
        """Whether it and its dead letters exist. Raises InvalidQueueName, BrokerUnavailable."""
        check_name(queue)
        try:
            exists = self._exists(queue)
            dead_letters = self._exists(poison_name(queue)) if exists else None
        except ConfigurationError:
            return QueueFacts(queue, unread="needs the right to read queues")
        return QueueFacts(queue, exists=exists, dead_letters=dead_letters)

    def _exists(self, name: str) -> bool:
        try:
            self._client.queue(name).get_queue_properties(
                read_timeout=SECONDS, raw_response_hook=self._learn
            )
        except AzureError as error:
            failure = failure_of(error, name)
            if failure.code == "QueueNotFound":
                return False
            raise failure.error from None
        return True

    def _learn(self, response: Any) -> None:
        self._client.learn_time(response.http_response.headers)
        self._learned = True

    def rights(self, queue: str) -> list[Right]:
        """What a worker needs: get, update, delete and add. Raises BrokerUnavailable."""
        client, nobody = self._client.queue(queue), str(uuid.uuid4())
        return [
            *(self._written(name, letter) for name, letter in _LETTERS),
            _tried(
                "update",
                queue,
                lambda: client.update_message(
                    nobody, RECEIPT, visibility_timeout=1, read_timeout=SECONDS
                ),
            ),
            _tried(
                "delete",
                queue,
                lambda: client.delete_message(nobody, RECEIPT, read_timeout=SECONDS),
            ),
        ]

    def _written(self, name: str, letter: str) -> Right:
        """What the key or the signature says."""
        address = self._client.address
        if address.key is not None:
            return Right(name)
        granted = _part(address, "sp")
        if granted is None:
            return Right(name, known=False)
        if letter in granted:
            return Right(name)
        return Right(
            name,
            ConfigurationError(
                f"the signature lacks {letter!r} ({name} messages); make one that has it"
            ),
        )

    def clock_offset(self, queue: str) -> float | None:
        """Seconds that the service's clock is ahead, to about a second."""
        return self._client.offset if self._learned else None

    def surroundings(self) -> list[Finding]:
        """Until when the signature is good."""
        expiry = _part(self._client.address, "se")
        if expiry is None:
            return []
        try:
            until = datetime.fromisoformat(expiry.replace("Z", "+00:00")).timestamp()
        except ValueError:
            return []  # the service judges what it means
        left = until - time.time()
        if left <= 0:
            text = f"the signature expired at {expiry}"
            error = ConfigurationError(text)
            return [problem("broker", EXPIRY, text, "make a new one", error)]
        if left < SOON:
            return [
                warning(
                    "broker",
                    EXPIRY,
                    f"the signature expires at {expiry}",
                    "replace it before; workers read it when they start",
                )
            ]
        return [fine("broker", EXPIRY, f"the signature is good until {expiry}")]


def _part(address: StorageQueueAddress, name: str) -> str | None:
    """A part of the signature that is no secret; None where there is none."""
    if address.signature is None:
        return None
    parts = parse_qs(address.signature.reveal().lstrip("?"))
    return parts[name][-1] if name in parts else None


def _tried(name: str, queue: str, attempt: Callable[[], object]) -> Right:
    try:
        attempt()
    except AzureError as error:
        failure = failure_of(error, queue)
        if isinstance(failure.error, BrokerUnavailable):
            raise failure.error from None
        if isinstance(failure.error, ConfigurationError):
            return Right(name, failure.error)
    return Right(name)
