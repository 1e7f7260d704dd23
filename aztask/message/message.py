"""The message: one invocation of a task on its way. Frozen: every change makes a new one.

Rules
1. ``body`` is the serialized ``[args, kwargs, embed]``. A retry, a replay or a delay chain re-uses
   it byte for byte; code that only moves messages never decodes it.
2. ``(id, generation, hop)`` names one delivery attempt of one invocation and never repeats: a clone
   raises the hop, a replay from the dead letters raises the generation. Every ``message_id``
   derives from the three. So duplicate detection never drops a clone by mistake, and always
   recognises a clone that was sent twice. A message that is put off before it started keeps the
   three, because it is still the same run; its ``message_id`` ends in a counter of its own.
3. A message carries plain data. `aztask.message.headers` checks it where it comes from outside.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import MISSING, dataclass, field, fields, replace
from hashlib import sha256
from typing import Any, TypeVar

from aztask.message.envelope import Envelope, living

MESSAGE_ID_LIMIT = 128
"""Characters allowed in a message id: Service Bus allows 128 (its documented quota)."""

COUNTER_LIMIT = 2**31 - 1
"""The highest accepted hop, generation or count: the largest 32-bit integer of AMQP."""

CONTINUE = "#continue"
"""What the wire adds to the task's name in a message that continues a parked run."""

RENEWED = "#renewed"
"""The same in a message of a task that continues with other arguments, in a history of its own."""

HISTORY = "aztask-history"
"""The header that names the history of a task's steps, if it is not the first one."""

CALLER = "aztask-caller"
"""The header of a task that another one waits for: the id of that one."""

_OWN_SERIES = 2**12
PUT_OFF_SERIES = COUNTER_LIMIT // _OWN_SERIES - 2
"""Series of put-offs that one run may have, each of 4,096 numbers; see `TaskMessage.put_off`."""


def plain_name(task: str) -> str:
    """The name of a task, from that on the wire."""
    return task.removesuffix(CONTINUE).removesuffix(RENEWED)


@dataclass(frozen=True)
class TaskMessage:
    """One invocation on its way, as ``context.message``.

    * `id`: the task id, the same in all retries and replays.
    * `body`: see rule 1.
    * `eta`, `expires`: the earliest and the latest start, UTC epoch seconds with microseconds.
    * `time_limit`, `soft_time_limit`: seconds.
    * `argsrepr`, `kwargsrepr`: for display only.
    * `correlation_id`: None means the id.
    * `session`: messages of one session run in order; `ordered`: a retry keeps its place in that
      order.
    * `resubmit_count`: failures so far; `snooze_count`: other re-runs.
    * `put_off_count`: the number of the last put-off of this run before it started: counted from
      1, or from the beginning of a series, see `put_off`.
    * `slots`: the slots of limits that it was put off for, see `aztask.limits.slots`.
    * `delivery_base`: the broker's delivery count at the last resubmit, for services whose count
      goes on.
    * `unknown_since`: when a worker first met the unknown task name, UTC epoch seconds.
    * `saved`: the encoded checkpoint.
    * `pointer`: the position of the deferred message that this message, which has no body, recalls.
    * `traceparent`: W3C trace context.
    * `lease_seconds`: the lease that was advised for the queue at the send.
    * `workflow`: the id of the workflow that it belongs to; `node`: its place in that, see
      `aztask.workflows.place`.
    * `payload`: the reference to the body, which is then empty, see `aztask.message.payload`.
    * `continued`: it continues a run that waited inside its task, see `parked`.
    * `extra`: other headers, passed on unchanged.
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
    workflow: str | None = None
    node: str | None = None
    put_off_count: int = 0
    slots: str | None = None
    payload: str | None = None
    continued: bool = False
    extra: Mapping[str, Any] = field(default_factory=dict)

    @property
    def key(self) -> tuple[str, int, int]:
        """``(id, generation, hop)``: the key of the recorded outcome."""
        return (self.id, self.generation, self.hop)

    @property
    def message_id(self) -> str:
        """``id:generation:hop``, at most 128 characters.

        If that would be longer, ``sha256-`` and 64 hexadecimal digits (the SHA-256 of the id in
        UTF-8) replace the id. A pointer's id ends in ``:pointer-N``, where N is the number of
        failures and snoozes so far, so that each deferral has its own. The id of a message that was
        put off ends in ``:put-N``, where N is the number of times.
        """
        tail = f":{self.generation}:{self.hop}"
        if self.pointer is not None:
            tail += f":pointer-{self.resubmit_count + self.snooze_count}"
        if self.put_off_count:
            tail += f":put-{self.put_off_count}"
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

        * `counted`: True for a failure (resubmit_count + 1), False otherwise (snooze_count + 1).
        * `saved`: a newer checkpoint; None keeps the current one.
        * `delivery_base`: the broker's delivery count if it goes on counting, else 0.
        * `unknown_since`: set while the task's name is unknown, cleared otherwise.
        * `eta`: when it may start, for services whose delays are chained.
        """
        return changed(
            self,
            hop=self.hop + 1,
            resubmit_count=self.resubmit_count + (1 if counted else 0),
            snooze_count=self.snooze_count + (0 if counted else 1),
            saved=self.saved if saved is None else saved,
            delivery_base=delivery_base,
            unknown_since=unknown_since,
            eta=eta,
            put_off_count=0,
            slots=None,
        )

    def pointing(self, position: int, *, counted: bool, delivery_base: int) -> TaskMessage:
        """The pointer to this message, which is about to be deferred at `position`.

        The pointer carries the counts, for workers without a result store, but no arguments.

        * `delivery_base`: the broker's delivery count, which deferring raises further.
        """
        return replace(
            self,
            body=b"",
            pointer=position,
            payload=None,
            resubmit_count=self.resubmit_count + (1 if counted else 0),
            snooze_count=self.snooze_count + (0 if counted else 1),
            delivery_base=delivery_base,
            saved=None,
            eta=None,
        )

    @property
    def times_put_off(self) -> int:
        """How often this copy of the run was put off; see `put_off`."""
        return self.put_off_count % _OWN_SERIES

    def put_off(
        self,
        *,
        delivery_base: int = 0,
        slots: str | None = None,
        series: int | None = None,
        unknown_since: float | None = None,
    ) -> TaskMessage:
        """The clone that waits longer, because this run may not start yet (a pause, a limit).

        It is the same run: the key and all counts of failures, snoozes and replays stay. Only
        `put_off_count` rises, which gives the clone a message id of its own.

        * `slots`: the slots for which it waits.
        * `series`: from 1 to `PUT_OFF_SERIES`; gives the clone, and those that follow it, ids of
          their own, which no other copy of this run has had.
        * `unknown_since`: set while the task's name is unknown, cleared otherwise.
        """
        first = self.put_off_count if series is None else self.times_put_off + series * _OWN_SERIES
        return replace(
            self,
            put_off_count=first + 1,
            delivery_base=delivery_base,
            slots=slots,
            unknown_since=unknown_since,
        )

    def parked(self, *, delivery_base: int = 0) -> TaskMessage:
        """The next hop of a run that waits inside its task: it wakes the run.

        No count rises, since nothing failed, and the expiry, which is for the first start, is gone.
        On the wire the task has a name of its own (`CONTINUE`): a worker of a release that cannot
        continue a run puts the message off as unknown, and does not run the task from its start.

        * `delivery_base`: as in `resubmitted`.
        """
        return replace(
            self,
            hop=self.hop + 1,
            continued=True,
            delivery_base=delivery_base,
            expires=None,
            unknown_since=None,
            eta=None,
            put_off_count=0,
            slots=None,
        )

    def woken(self) -> TaskMessage:
        """This next hop of a parked run (`parked`), sent before its time.

        Its message id is of a series that no put-off has: under the id of the timer, which may
        still be in the queue, duplicate detection would drop it.
        """
        return replace(self, delivery_base=0, put_off_count=(PUT_OFF_SERIES + 1) * _OWN_SERIES + 1)

    def renewed(self, arguments: TaskMessage, history: str) -> TaskMessage:
        """The next hop of a run that continues with other arguments, in a history of its own.

        The counts start at 0, so it gets all its retries again; neither the expiry, which is for
        the first start, nor a checkpoint remains.

        * `arguments`: has the new body. `history`: the name of the new history.
        """
        return replace(
            arguments,
            extra={**self.extra, HISTORY: history},
            hop=self.hop + 1,
            continued=False,
            resubmit_count=0,
            snooze_count=0,
            expires=None,
            unknown_since=None,
            eta=None,
            saved=None,
            put_off_count=0,
            slots=None,
        )

    def chained(self, *, delivery_base: int = 0) -> TaskMessage:
        """The next link of a delay chain: the message arrived before its eta and is delayed again.

        Only the hop and the delivery base change; neither count rises.
        """
        return replace(self, hop=self.hop + 1, delivery_base=delivery_base)

    def replayed(self, *, keep_saved: bool = True, expires: float | None = None) -> TaskMessage:
        """The same invocation, sent again from the dead letters: a new generation.

        The hop and the counts start at 0, so it gets all its retries again. By default the
        checkpoint is kept and the work goes on from there; ``keep_saved=False`` starts afresh, in
        case the checkpoint itself causes the failure, and begins a new history of steps: recorded
        ones run again. The old expiry belonged to the first send,
        and is often the reason for the dead letter: only `expires` applies.
        """
        extra = living(self.extra)
        return replace(
            self,
            extra=extra if keep_saved else {**extra, HISTORY: str(self.generation + 1)},
            generation=self.generation + 1,
            hop=0,
            resubmit_count=0,
            snooze_count=0,
            delivery_base=0,
            unknown_since=None,
            eta=None,
            expires=expires,
            saved=self.saved if keep_saved else None,
            continued=self.continued and keep_saved,
            put_off_count=0,
            slots=None,
        )


MESSAGE_FIELDS = tuple(each.name for each in fields(TaskMessage))
"""The names of all fields, in order."""

MESSAGE_DEFAULTS: Mapping[str, Any] = {
    each.name: {} if each.name == "extra" else each.default
    for each in fields(TaskMessage)
    if each.default is not MISSING or each.name == "extra"
}
"""Defaults of the optional fields, for `build`. No code changes ``extra``."""


# -- the ids of messages that are sent again later: each is derived from the one before ----


def next_link(envelope: Envelope) -> str:
    """The message id of the envelope's next clone: ``ID~1``, ``ID~2``, ...

    It is derived from the previous id, so a clone that is sent twice counts as one message. A
    message without an id stays without: clones of different messages must not share an id.
    """
    if not envelope.message_id:
        return ""
    base, mark, number = envelope.message_id.rpartition("~")
    if mark and number.isascii() and number.isdigit() and len(number) < 10:
        return f"{base}~{int(number) + 1}"
    if len(envelope.message_id) > MESSAGE_ID_LIMIT - 10:
        digest = sha256(envelope.message_id.encode("utf-8", "surrogatepass")).hexdigest()
        return f"sha256-{digest}~1"
    return f"{envelope.message_id}~1"


# -- frozen dataclasses made quickly, where millions are made --------------------------------------
#
# Make frozen dataclasses quickly where millions are made.
#
# The generated ``__init__`` of a frozen dataclass calls ``object.__setattr__`` once for each field:
# 6 us for the 31 fields of a message, more than any other step on its way into a queue. Without
# slots, a frozen dataclass keeps its fields in a dict, which can be set in one step.

T = TypeVar("T")


def build(kind: type[T], values: dict[str, Any]) -> T:
    """Make an instance with exactly these fields: give all of them, none is checked or defaulted.

    The instance takes over the dict: do not use it afterwards.
    """
    made = object.__new__(kind)
    object.__setattr__(made, "__dict__", values)
    return made


def changed(value: T, **changes: Any) -> T:
    """A copy with these fields changed: `dataclasses.replace`, for instances that `build` can make.

    Nothing checks that the fields exist.
    """
    return build(type(value), {**value.__dict__, **changes})
