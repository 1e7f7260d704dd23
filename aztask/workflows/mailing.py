"""Sends nodes of a workflow: the messages that its starter signed for their places, verified.

With keys, each is signed anew for its queue: what is stored cannot be sent as it is.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Final, Protocol, TypeAlias

from aztask.errors import CodecError
from aztask.message.codec import Codec
from aztask.message.envelope import Envelope
from aztask.message.message import TaskMessage
from aztask.queues.base import EnvelopeSender
from aztask.stores.records.damage import Damaged
from aztask.stores.records.workflows import DocumentChange
from aztask.support.clock import Clock
from aztask.support.failpoint import hit
from aztask.workflows.graph import (
    DELAY,
    EXPIRES,
    Graphs,
    Root,
    is_part,
    pack_messages,
    read_messages,
    split_extra,
)

logger = logging.getLogger(__name__)

BATCH: Final = 500


Posted: TypeAlias = tuple[TaskMessage, Envelope]
"""A message that was sent, and its envelope, which has its delay."""


def place_of(workflow: str, node: int) -> str:
    """Where a node's message is stored, as its signature says."""
    return f"workflow {workflow}, node {node}"


class Outlet(Protocol):
    """Where messages of workflows go: the broker of this process, and who learns of them."""

    def sender(self) -> EnvelopeSender:
        """The broker, opened when it is first needed."""
        ...

    def posted(self, posted: Sequence[Posted], /) -> None:
        """Report messages that the broker has accepted.

        If that was in a transaction which is rolled back, they are sent and reported again.
        """
        ...


class BatchWatch(Protocol):
    """Follows a call that sends many nodes."""

    def sent(self) -> None:
        """Go on after a batch that the broker has accepted."""
        ...


class Mailer:
    """Sends stored messages under their deterministic ids. Any thread may call."""

    def __init__(self, outlet: Outlet, codec: Codec, graphs: Graphs, clock: Clock) -> None:
        self._outlet = outlet
        self._codec = codec
        self._graphs = graphs
        self._clock = clock

    def send(
        self,
        workflow: str,
        root: Root,
        nodes: Sequence[tuple[int, int]],
        watch: BatchWatch | None = None,
        made: Mapping[int, Posted] | None = None,
    ) -> list[tuple[int, str]]:
        """Send nodes, each (node, generation); returns those refused, with the reasons.

        A node's message is refused if its signature is wrong. Raises Damaged, BrokerUnavailable
        and SendUnconfirmed: repeating the call is harmless.

        * `watch`: learns of each batch.
        * `made`: messages that this process has just made and stored. They are neither read nor
          verified.
        """
        refused: list[tuple[int, str]] = []
        made = made or {}
        missing = [node for node, _ in nodes if node not in made]
        stored = self._graphs.messages(workflow, root, missing) if missing else {}
        queues: dict[str, list[Posted]] = {}
        for node, generation in nodes:
            if node in made:
                message, envelope = made[node]
                if self._codec.signs or DELAY in message.extra or EXPIRES in message.extra:
                    envelope = self._fresh(message, generation)
                queues.setdefault(message.queue, []).append((message, envelope))
                continue
            queue, envelope = stored[node]
            try:
                message = self._verified(workflow, node, queue, envelope)
                pair = message, self._fresh(message, generation)
                queues.setdefault(queue, []).append(pair)
            except (CodecError, Damaged) as error:
                logger.error(
                    "workflow %s: node %d is not sent, it fails: its stored message is refused: %s",
                    workflow,
                    node,
                    error,
                )
                refused.append((node, str(error)))
        broker = self._outlet.sender()
        for queue, pairs in queues.items():
            for first in range(0, len(pairs), BATCH):
                part = pairs[first : first + BATCH]
                broker.send(queue, [envelope for _, envelope in part])
                self._outlet.posted(part)
                hit("followed", len(part))
                if watch is not None:
                    watch.sent()
        return refused

    def stored(self, workflow: str, root: Root, node: int) -> TaskMessage:
        """The message of a node as it was stored. Raises Damaged and CodecError."""
        queue, envelope = self._graphs.messages(workflow, root, [node])[node]
        return self._verified(workflow, node, queue, envelope)

    def sign_anew(self, workflow: str) -> bool:
        """Sign what a release before 0.2 has stored of a workflow, where it lies.

        Its messages are signed for their places, so that no queue accepts them any longer, and its
        documents as those of this release are. False if
        another process has changed one of them in between: call it again.

        Raises Damaged for a document that is refused, or one of whose pieces is, and CodecError for
        such a message: nothing of the workflow is signed then.
        """
        store = self._graphs.store
        names = store.unsigned_documents(workflow)
        found = store.read([(workflow, name) for name in names])
        refused = [each.refused for each in found if each is not None and each.refused]
        if refused:
            raise Damaged(refused[0])
        changes = [
            DocumentChange(workflow, name, self._signed_anew(workflow, name, each.data), each.tag)
            for name, each in zip(names, found, strict=True)
            if each is not None
        ]
        return not changes or None not in store.write(changes)

    def _signed_anew(self, workflow: str, name: str, data: bytes) -> bytes:
        if not is_part(name):
            return data
        rows = []
        for node, queue, envelope in read_messages(data):
            place = place_of(workflow, node)
            message = self._verified(workflow, node, queue, envelope)
            rows.append((node, queue, self._codec.to_envelope(message, stored=place)))
        return pack_messages(rows)

    def _verified(self, workflow: str, node: int, queue: str, envelope: Envelope) -> TaskMessage:
        message = self._codec.from_envelope(envelope, queue, stored=place_of(workflow, node))
        if message.workflow != workflow:
            raise Damaged(f"it belongs to workflow {message.workflow}")
        return message

    def _fresh(self, message: TaskMessage, generation: int) -> Envelope:
        """The message as it is sent now: its delay and its expiry begin."""
        extra, delay, expires = split_extra(message.extra)
        expires_at = None if expires is None else self._clock.wall() + expires
        fresh = replace(message, extra=extra, expires=expires_at, generation=generation)
        return self._codec.to_envelope(fresh, delay=delay)
