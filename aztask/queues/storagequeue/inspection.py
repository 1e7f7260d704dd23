"""Inspects Storage queues, and our permissions on them.

Rules
1. Reading a queue's properties needs a permission that a worker does not need. Without it, the
   queue's settings stay unread.
2. The permissions to update and to delete are checked on a message that does not exist: the service
   checks the permission before it looks for the message. Getting and adding cannot be checked
   without doing it. A signature says whether it allows them; otherwise they stay unknown.
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
from aztask.errors import BrokerUnavailable, ConfigurationError
from aztask.queues.base import Permission, QueueFacts
from aztask.queues.storagequeue.errors import failure_of
from aztask.queues.storagequeue.kind import KIND, poison_name
from aztask.queues.storagequeue.messages import StorageClient
from aztask.support.finding import Finding, fine, problem, warning

SECONDS: Final = 10.0
RECEIPT: Final = "AgAAAAMAAAAAAAAAAAAAAAAAAAA="
"""Has the form of a pop receipt, but belongs to no message."""

SOON: Final = 7 * 86400.0
EXPIRY: Final = "signature"
_LETTERS: Final = (("get", "p"), ("add", "a"))


class StorageInspector:
    """Inspects the queues of an account with at most two requests each."""

    def __init__(self, client: StorageClient) -> None:
        self._client = client
        self._learned = False

    def facts(self, queue: str) -> QueueFacts:
        """Whether the queue and its dead-letter queue exist.

        Raises InvalidQueueName, BrokerUnavailable.
        """
        KIND.check_name(queue)
        try:
            exists = self._exists(queue)
            dead_letters = self._exists(poison_name(queue)) if exists else None
        except ConfigurationError:
            return QueueFacts(queue, unread="needs the permission to read queues")
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

    def rights(self, queue: str) -> list[Permission]:
        """The permissions that a worker needs: get, add, update and delete.

        Raises BrokerUnavailable.
        """
        client, missing_id = self._client.queue(queue), str(uuid.uuid4())
        return [
            *(self._written(name, letter) for name, letter in _LETTERS),
            _tried(
                "update",
                queue,
                lambda: client.update_message(
                    missing_id, RECEIPT, visibility_timeout=1, read_timeout=SECONDS
                ),
            ),
            _tried(
                "delete",
                queue,
                lambda: client.delete_message(missing_id, RECEIPT, read_timeout=SECONDS),
            ),
        ]

    def _written(self, name: str, letter: str) -> Permission:
        """The permission as the key or the signature states it."""
        address = self._client.address
        if address.key is not None:
            return Permission(name)
        granted = _part(address, "sp")
        if granted is None:
            return Permission(name, known=False)
        if letter in granted:
            return Permission(name)
        return Permission(
            name,
            ConfigurationError(
                f"the signature lacks {letter!r} ({name} messages); create one that has it"
            ),
        )

    def clock_offset(self, queue: str) -> float | None:
        """Seconds that the service's clock is ahead, accurate to about a second."""
        return self._client.offset if self._learned else None

    def surroundings(self) -> list[Finding]:
        """Findings about the expiry of the signature, if there is one."""
        expiry = _part(self._client.address, "se")
        if expiry is None:
            return []
        try:
            until = datetime.fromisoformat(expiry.replace("Z", "+00:00")).timestamp()
        except ValueError:
            return []  # only the service knows what it means
        left = until - time.time()
        if left <= 0:
            text = f"the signature expired at {expiry}"
            error = ConfigurationError(text)
            return [problem("broker", EXPIRY, text, "create a new one", error)]
        if left < SOON:
            return [
                warning(
                    "broker",
                    EXPIRY,
                    f"the signature expires at {expiry}",
                    "replace it before then; workers read it when they start",
                )
            ]
        return [fine("broker", EXPIRY, f"the signature is valid until {expiry}")]


def _part(address: StorageQueueAddress, name: str) -> str | None:
    """A parameter of the signature that is no secret, or None."""
    if address.signature is None:
        return None
    parts = parse_qs(address.signature.reveal().lstrip("?"))
    return parts[name][-1] if name in parts else None


def _tried(name: str, queue: str, attempt: Callable[[], object]) -> Permission:
    try:
        attempt()
    except AzureError as error:
        failure = failure_of(error, queue)
        if isinstance(failure.error, BrokerUnavailable):
            raise failure.error from None
        if isinstance(failure.error, ConfigurationError):
            return Permission(name, failure.error)
    return Permission(name)
