"""The message: one invocation of a task, as it travels. Frozen: every change makes a new one.

Rules
1. ``body`` is the serialized ``[args, kwargs, embed]``. A retry, a replay or a delay chain re-uses
   it byte for byte; whoever only moves messages never decodes it.
2. ``(id, generation, hop)`` names one delivery attempt of one invocation and never comes twice:
   a clone raises the hop, a replay out of the dead letters raises the generation. Every
   ``message_id`` derives from the three, so duplicate detection never swallows a clone and always
   recognises a clone that was sent twice.
3. What a message carries is plain data; `aztask.message.headers` checks it where it comes from
   outside.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import MISSING, dataclass, field, fields, replace
from hashlib import sha256
from typing import Any

MESSAGE_ID_LIMIT = 128
"""Characters of a message id: Service Bus allows 128 (its documented quota)."""

COUNTER_LIMIT = 2**31 - 1
"""The highest hop, generation or count that is accepted: what AMQP's smaller integers hold."""


@dataclass(frozen=True)
class TaskMessage:
    """One invocation on its way.

    id: the task id, stable through retries and replays. body: see rule 1. eta: not before,
    expires: not after, both UTC epoch seconds with microseconds. time_limit, soft_time_limit:
    seconds. argsrepr, kwargsrepr: for the eye only. correlation_id: None means the id. session:
    messages of one session run in order; ordered: a retry keeps its place in that order, too.
    resubmit_count: failures so far; snooze_count: other
    re-runs. delivery_base: the broker's delivery count at the last resubmit, for services that
    go on counting. unknown_since: when a worker first met the unknown task name. saved: the
    encoded checkpoint. pointer: the position of the deferred message that this one, which has no
    body, calls for. traceparent: W3C trace context. lease_seconds: the lease that was advised for
    the queue when it was sent. extra: further headers, passed on as they are.
    """

    id: str
    task: str
    queue: str
    body: bytes
    content_type: str = "application/x-msgpack"
    content_encoding: str = "binary"
    root_id: str | None = None
    parent_id: str | None = None
    group: str | None = None
    eta: float | None = None
    expires: float | None = None
    time_limit: float | None = None
    soft_time_limit: float | None = None
    argsrepr: str | None = None
    kwargsrepr: str | None = None
    origin: str | None = None
    correlation_id: str | None = None
    reply_to: str | None = None
    session: str | None = None
    ordered: bool = True
    resubmit_count: int = 0
    snooze_count: int = 0
    hop: int = 0
    generation: int = 0
    delivery_base: int = 0
    unknown_since: float | None = None
    saved: bytes | None = None
    pointer: int | None = None
    traceparent: str | None = None
    lease_seconds: float | None = None
    extra: Mapping[str, Any] = field(default_factory=dict)

    @property
    def key(self) -> tuple[str, int, int]:
        """``(id, generation, hop)``: what an outcome is recorded under."""
        return (self.id, self.generation, self.hop)

    @property
    def message_id(self) -> str:
        """``id:generation:hop``, at most 128 characters.

        Where that would be longer, ``sha256-`` and 64 hexadecimal digits (the SHA-256 of the id
        in UTF-8) stand in the place of the id. A pointer's ends in ``:pointer-N``, N being how
        often the invocation has failed or asked to run again: each deferral has another.
        """
        tail = f":{self.generation}:{self.hop}"
        if self.pointer is not None:
            tail += f":pointer-{self.resubmit_count + self.snooze_count}"
        name = f"{self.id}{tail}"
        if len(name) <= MESSAGE_ID_LIMIT:
            return name
        digest = sha256(self.id.encode("utf-8", "surrogatepass")).hexdigest()
        return f"sha256-{digest}{tail}"

    def resubmitted(
        self,
        *,
        counted: bool,
        saved: bytes | None = None,
        delivery_base: int = 0,
        unknown_since: float | None = None,
        eta: float | None = None,
    ) -> TaskMessage:
        """The clone that runs this invocation again.

        counted: a failure (resubmit_count + 1) or not (snooze_count + 1). saved: a newer
        checkpoint; None keeps the one that is there. delivery_base: the broker's delivery count
        where it goes on counting, else 0. unknown_since: given while the task's name is unknown,
        cleared otherwise. eta: the time it is due, for services whose delays are chained.
        """
        return replace(
            self,
            hop=self.hop + 1,
            resubmit_count=self.resubmit_count + (1 if counted else 0),
            snooze_count=self.snooze_count + (0 if counted else 1),
            saved=self.saved if saved is None else saved,
            delivery_base=delivery_base,
            unknown_since=unknown_since,
            eta=eta,
        )

    def pointing(self, position: int, *, counted: bool, delivery_base: int) -> TaskMessage:
        """The pointer to this message, which is about to be deferred at `position`.

        It carries the counts, for workers without a result store, and nothing of the work.
        delivery_base: the broker's delivery count, which deferring goes on raising.
        """
        return replace(
            self,
            body=b"",
            pointer=position,
            resubmit_count=self.resubmit_count + (1 if counted else 0),
            snooze_count=self.snooze_count + (0 if counted else 1),
            delivery_base=delivery_base,
            saved=None,
            eta=None,
        )

    def chained(self, *, delivery_base: int = 0) -> TaskMessage:
        """The next link of a delay chain: the message came before its eta and is put off again.

        Nothing but the hop (and the delivery base) changes; neither count rises.
        """
        return replace(self, hop=self.hop + 1, delivery_base=delivery_base)

    def replayed(self, *, keep_saved: bool = True, expires: float | None = None) -> TaskMessage:
        """The same invocation, sent again out of the dead letters: a new generation.

        Its hop and its counts start at 0, so it gets all its retries again. The checkpoint is
        kept, since the work goes on from where it was left; ``keep_saved=False`` starts afresh,
        for the case that the checkpoint itself is the trouble. The old expiry belonged to the
        first send and often is the reason why the message is dead: only `expires` counts.
        """
        return replace(
            self,
            generation=self.generation + 1,
            hop=0,
            resubmit_count=0,
            snooze_count=0,
            delivery_base=0,
            unknown_since=None,
            eta=None,
            expires=expires,
            saved=self.saved if keep_saved else None,
        )


MESSAGE_FIELDS = tuple(each.name for each in fields(TaskMessage))
"""The names of all fields, in order."""

MESSAGE_DEFAULTS: Mapping[str, Any] = {
    each.name: {} if each.name == "extra" else each.default
    for each in fields(TaskMessage)
    if each.default is not MISSING or each.name == "extra"
}
"""The fields that may be left out, for `aztask.support.frozen.build`. No code changes ``extra``."""
