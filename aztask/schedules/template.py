"""The definition of a schedule, and the signed message that carries it in the result store.

The message of a definition has the schedule's name as its id, and a header (`SPEC`) with everything
else. It is signed for its place: a program without the key changes no schedule, and sends none.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Final

import msgpack

from aztask.errors import MessageTooLarge
from aztask.message.codec import Codec
from aztask.message.encryption import PLAIN_DIGESTS, KeyDigests
from aztask.message.message import TaskMessage
from aztask.message.signatures import STORED
from aztask.queues.local.payload import envelope_of, payload_of
from aztask.schedules.rules import Rules, read_rules
from aztask.schedules.triggers import Trigger, read_trigger
from aztask.stores.records.damage import Columns, Damaged
from aztask.stores.records.schedules import HEAD_BYTES

SPEC: Final = "aztask-schedule-spec"
ROOM: Final = 2048
"""Bytes of a head beside its template."""


@dataclass(frozen=True, slots=True)
class Definition:
    """What is sent, and when.

    * `message`: the task's message; its id is the schedule's name.
    * `delay`, `expires`: seconds from each send; `expires` may be None.
    * `graph`: the message's body is a workflow, see `aztask.schedules.graphs`; its task and queue
      are those of the first task.
    * `digests`: make its digest, which is stored; with encryption it tells nothing of arguments.
    """

    message: TaskMessage
    trigger: Trigger
    rules: Rules
    delay: float = 0.0
    expires: float | None = None
    graph: bool = False
    digests: KeyDigests = PLAIN_DIGESTS

    @property
    def name(self) -> str:
        """The name of the schedule, with the app's in front."""
        return self.message.id

    @property
    def spec(self) -> bytes:
        """Everything beside the message, packed for the header."""
        packed: bytes = msgpack.packb(
            {
                "trigger": self.trigger.packed(),
                "rules": self.rules.packed(),
                "delay": self.delay,
                "expires": self.expires,
                # A release that knows no workflows here misses the queue, and sends nothing.
                "graph_queue" if self.graph else "queue": self.message.queue,
            }
        )
        return packed

    @property
    def digest(self) -> str:
        """Equal for equal definitions, whatever their signatures."""
        message = self.message
        parts = (message.task, message.body, message.content_type, message.session, message.ordered)
        return self.digests.long(msgpack.packb([*parts, self.spec]))

    @property
    def options(self) -> dict[str, Any]:
        """The send options of each occurrence's task, without its id and its delay."""
        message = self.message
        found: dict[str, Any] = {"queue": message.queue}
        if message.session is not None:
            found |= {"session": message.session, "ordered": message.ordered}
        if self.expires is not None:
            found["expires"] = self.expires
        return found


def template_of(codec: Codec, definition: Definition) -> bytes:
    """The definition as bytes, signed. Raises EncodeError and MessageTooLarge."""
    message = replace(definition.message, extra={SPEC: definition.spec})
    data = payload_of(codec.to_envelope(message, stored=f"schedule {message.id}"))
    if len(data) > HEAD_BYTES - ROOM:
        raise MessageTooLarge(
            f"schedule {definition.name}: its arguments take {len(data)} bytes, and a schedule has "
            f"room for {HEAD_BYTES - ROOM}; store them elsewhere and pass their place"
        )
    return data


def is_signed_before(codec: Codec, data: bytes) -> bool:
    """Whether a release before 0.2 has signed a definition: for a queue, as well as for its place.

    Such a release reads what this one has signed.
    """
    return codec.takes_old and STORED.encode() not in data


def read_template(codec: Codec, name: str, data: bytes) -> Definition:
    """The definition in these bytes, its signature verified.

    Raises Damaged, CodecError, and ConfigurationError for times that this computer cannot know.
    """
    envelope = envelope_of(data)
    spec = envelope.headers.get(SPEC) if isinstance(envelope.headers, Mapping) else None
    found = Columns({"spec": spec}).unpacked("spec")
    if not isinstance(found, dict):
        raise Damaged("its definition is missing")
    columns = Columns(found)
    graph = "graph_queue" in found
    queue = columns.text("graph_queue" if graph else "queue")
    message = codec.from_envelope(envelope, queue, stored=f"schedule {name}")
    if message.id != name:
        raise Damaged(f"its definition is that of schedule {message.id}")
    return Definition(
        replace(message, extra={}),
        read_trigger(found.get("trigger")),
        read_rules(found.get("rules")),
        columns.time("delay"),
        columns.optional_time("expires"),
        graph,
        codec.digests,
    )
