"""Signatures of Celery become messages, as ``apply_async`` of Celery would send them.

Rules
1. A message has the id that Celery gave its signature (``options["task_id"]``). Without one, its id
   follows from the task that it follows, so that launching again sends the same ids.
2. The body keeps the format of the message that it follows: a Celery worker reads what it accepts.
3. The queue is the one that the signature names; else that of the task, if it is registered here;
   else the queue of the message that it follows.
4. Groups inside a group are flattened, and a chain or a chord inside a header joins with its last
   task, as in ``celery.canvas``.
"""

from __future__ import annotations

import math
import uuid
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, NamedTuple, Protocol

from aztask.errors import ContentRefused, DecodeError
from aztask.message.codec import Codec
from aztask.message.foreign import RAW
from aztask.message.headers import LONGEST_RUN, read_time
from aztask.message.message import MESSAGE_DEFAULTS, TaskMessage, build
from aztask.support.display import one_line

# -- the third part of a body of message protocol 2, ``embed``, as a value -----------------
#
# Rules
# 1. A body that embeds nothing costs one comparison of its end: `may_embed`.
# 2. A part that aztask does not know is refused, never dropped silently.
# 3. A message embeds at most `MOST` tasks, at whatever depth: one message does not make millions.
#
# Source: Celery's documentation, "Message Protocol", version 2; ``celery.app.amqp.as_task_v2``.


_NOTHING: Final = (b"\x80", b"{}]")
"""How the bodies end that aztask writes, in msgpack and in json: with an empty map."""

Signature = dict[str, Any]
"""A signature as Celery serializes it: task, args, kwargs, options, subtask_type, immutable."""


@dataclass(frozen=True, slots=True)
class Embedded:
    """What follows a task. Each signature is a map, as Celery writes it.

    * `callbacks`: called with the value. `errbacks`: called after a final failure.
    * `chain`: the rest of the chain; the last element comes next.
    * `chord`: the body of the chord that the task is a member of.
    """

    callbacks: tuple[Signature, ...] = ()
    errbacks: tuple[Signature, ...] = ()
    chain: tuple[Signature, ...] = ()
    chord: Signature | None = None


def may_embed(message: TaskMessage) -> bool:
    """Whether the body has to be decoded to know what it embeds (rule 1)."""
    body = message.body
    return not body.endswith(_NOTHING) and bool(body) and message.content_type != RAW


def read_embedded(codec: Codec, message: TaskMessage) -> Embedded | None:
    """What the message embeds, None if nothing. Raises DecodeError and ContentRefused."""
    embed = codec.decode_embed(message)
    parts = {name: value for name, value in embed.items() if value}
    if not parts:
        return None
    if _tasks_in(parts) > MOST:
        raise ContentRefused(f"the message embeds more than {MOST:,} tasks")
    chord = parts.pop("chord", None)
    lists = {name: _signatures(parts.pop(name, ()), name) for name in _LISTS}
    if parts:
        names = one_line(", ".join(map(str, parts)), 100)
        raise ContentRefused(f"the message embeds {names}, which aztask does not know")
    return Embedded(**lists, chord=None if chord is None else signature(chord, "chord"))


_LISTS: Final = ("callbacks", "errbacks", "chain")
MOST: Final = 10_000
"""The most tasks that a message may embed; chains, groups and chords themselves do not count."""

_COMPOUND: Final = ("chain", "group", "chord")
_HOLD_TASKS: Final = ("tasks", "header", "body", "link", "link_error", "chain", "chord")
"""The keywords of compound signatures, and the options of all, that hold signatures."""


def _tasks_in(parts: Mapping[str, Any]) -> int:
    """How many tasks these parts of a message hold, at whatever depth; counts to `MOST` + 1."""
    stack: list[Any] = list(parts.values())
    count = 0
    while stack and count <= MOST:
        value = stack.pop()
        if isinstance(value, list | tuple):
            stack += value
        elif isinstance(value, Mapping):
            inner = [value.get("options")]
            if value.get("subtask_type") in _COMPOUND:
                inner.append(value.get("kwargs"))
            else:
                count += 1
            for part in inner:
                if isinstance(part, Mapping):
                    stack += [part[name] for name in _HOLD_TASKS if name in part]
    return count


_PARTS: Final[tuple[tuple[str, type], ...]] = (("args", list), ("kwargs", dict), ("options", dict))


def _signatures(value: object, name: str) -> tuple[Signature, ...]:
    if isinstance(value, Mapping):
        value = [value]
    if not isinstance(value, list | tuple):
        raise DecodeError(f"{name} must be a list of signatures, not {type(value).__name__}")
    return tuple(signature(each, name) for each in value)


def signature(value: object, name: str) -> Signature:
    """Check that `value` has the parts of a signature. Raises DecodeError."""
    if not isinstance(value, dict) or not isinstance(value.get("task"), str):
        raise DecodeError(f"{name} holds something that is not a signature")
    for part, kind in _PARTS:
        if not isinstance(value.get(part) or kind(), kind):
            raise DecodeError(f"{name}: {part} of a signature must be a {kind.__name__}")
    return value


_NAMESPACE: Final = uuid.UUID("6f1c6c0e-5d3b-4f0e-9a0e-6d9b8a1c7e42")
DEPTH: Final = 50
"""How deeply chains, groups and chords may be nested."""


class QueueOf(Protocol):
    """The part of an app that knows the queue of a registered task."""

    def __call__(self, task: str) -> str | None:
        """The queue, or None for a task that is not registered here."""
        ...


class Launched(NamedTuple):
    """A message to send, and the seconds until it may start."""

    message: TaskMessage
    delay: float


class EmbeddedChord(NamedTuple):
    """A chord that was started: its group, its body, and how many members it waits for."""

    group: str
    body: Signature
    size: int


@dataclass
class Membership:
    """The chord that tasks join when they end; hands out their places."""

    group: str
    body: Signature | None
    size: int = 0

    def next_index(self) -> int:
        """The place of one more member."""
        self.size += 1
        return self.size - 1


@dataclass
class Launch:
    """Makes the messages that follow one message.

    * `now`: UTC epoch seconds.
    * `messages`, `chords`: what to send, and the chords to note before.
    * `full`: the chords whose bodies are among the messages.
    """

    codec: Codec
    parent: TaskMessage
    queue_of: QueueOf
    now: float
    messages: list[Launched] = field(default_factory=list)
    chords: list[EmbeddedChord] = field(default_factory=list)
    full: list[str] = field(default_factory=list)

    def follow(
        self, sig: Signature, values: Sequence[Any], seed: str, chain: Sequence[Signature] = ()
    ) -> None:
        """Launch `sig` with `values` in front of its arguments; `chain` follows it.

        * `seed`: names this place among what follows the parent (rule 1).

        Raises DecodeError for a signature that Celery would not write, EncodeError for a value.
        """
        self._launch(sig, list(values), seed, list(chain), None, 0)

    # -- kinds of signatures -----------------------------------------------------------------

    def _launch(
        self, sig: Signature, values: list[Any], seed: str, chain: list[Signature],
        joins: Membership | None, depth: int,
    ) -> None:  # fmt: skip
        if depth > DEPTH:
            raise DecodeError(f"signatures are nested more than {DEPTH} levels deep")
        signature(sig, seed)
        options = sig.get("options") or {}
        if joins is None and options.get("chord") and options.get("group_id"):
            joins = _Given(str(options["group_id"]), options["chord"], options.get("group_index"))
        kind = sig.get("subtask_type")
        part = sig.get("kwargs") or {}
        if kind == "chain":
            self._chain(sig, part, values, seed, chain, joins, depth)
        elif kind == "group" and (chain or joins is not None):
            body = chain[-1] if chain else None
            rest = chain[:-1]
            if body is None:
                self._members(_tasks(part), values, seed, joins, depth)
            else:
                self._chord(_tasks(part), body, options, values, seed, rest, joins, depth)
        elif kind == "group":
            group = str(options.get("task_id") or self._id(f"{seed}:group"))
            self._members(_tasks(part), values, seed, Membership(group, None), depth, options)
        elif kind == "chord":
            header = part.get("header")
            if isinstance(header, dict):  # a group in the place of its members
                header = _tasks(signature(header, "a header").get("kwargs") or {})
            body = signature(part.get("body"), "the body of a chord")
            body = _with_links(body, options)
            self._chord(_list(header), body, options, values, seed, chain, joins, depth)
        else:
            self._task(sig, options, values, seed, chain, joins)

    def _chain(
        self, sig: Signature, part: Mapping[str, Any], values: list[Any], seed: str,
        chain: list[Signature], joins: Membership | None, depth: int,
    ) -> None:  # fmt: skip
        """The first task now; the others, in Celery's order from the end, are embedded in it."""
        tasks = _tasks(part)
        if not tasks:
            return
        tasks[-1] = _with_links(tasks[-1], sig.get("options") or {})
        if joins is not None and len(tasks) > 1:
            tasks[-1] = _joined(tasks[-1], joins)
            joins = None
        rest = [*chain, *reversed(tasks[1:])]
        self._launch(tasks[0], values, f"{seed}:0", rest, joins, depth + 1)

    def _chord(
        self, members: list[Signature], body: Signature, options: Mapping[str, Any],
        values: list[Any], seed: str, chain: list[Signature], joins: Membership | None, depth: int,
    ) -> None:  # fmt: skip
        """Launch the header; the body follows when all of its members have ended."""
        if joins is not None:
            body = _joined(body, joins)
        if chain:
            body = _merged(body, chain=chain)
        if not (body.get("options") or {}).get("task_id"):
            body = _merged(body, task_id=self._id(f"{seed}:body"))
        group = str(options.get("task_id") or self._id(f"{seed}:group"))
        membership = Membership(group, body)
        self._members(members, values, seed, membership, depth)
        if membership.size:
            self.chords.append(EmbeddedChord(group, body, membership.size))
        else:
            self._launch(body, [[]], f"{seed}:body", chain, None, depth + 1)

    def _members(
        self, members: list[Signature], values: list[Any], seed: str, joins: Membership | None,
        depth: int, options: Mapping[str, Any] = {},
    ) -> None:  # fmt: skip
        for number, member in enumerate(_flat(members, depth)):
            linked = _with_links(member, options)
            plain = _without_membership(linked)
            self._launch(plain, values, f"{seed}:{number}", [], joins, depth + 1)

    # -- one task ----------------------------------------------------------------------------

    def _task(
        self, sig: Signature, options: Mapping[str, Any], values: list[Any], seed: str,
        chain: list[Signature], joins: Membership | None,
    ) -> None:  # fmt: skip
        args = list(sig.get("args") or ())
        if not sig.get("immutable"):
            args = [*values, *args]
        embed: dict[str, Any] = {
            "callbacks": _list(options.get("link")) or None,
            "errbacks": _list(options.get("link_error")) or None,
            "chain": chain or _list(options.get("chain")) or None,
            "chord": joins.body if joins is not None else None,
        }
        body, content_type, encoding = self.codec.encode_embedding(
            args, sig.get("kwargs") or {}, embed, self.parent.content_type
        )
        task, delay = str(sig["task"]), self._delay(options)
        headers = options.get("headers") or {}
        if not isinstance(headers, dict):
            raise DecodeError(f"headers of task {task} are not a map")
        extra = dict(headers)
        if joins is not None:
            extra["group_index"] = joins.next_index()
        limits = {name: options.get(name) for name in ("time_limit", "soft_time_limit")}
        limits = {name: _seconds(name, value) for name, value in limits.items() if value}
        message = build(
            TaskMessage,
            {
                **MESSAGE_DEFAULTS,
                "id": str(options.get("task_id") or self._id(seed)),
                "task": task,
                "queue": self._queue(task, options),
                "body": body,
                "content_type": content_type,
                "content_encoding": encoding,
                "root_id": self.parent.root_id or self.parent.id,
                "parent_id": self.parent.id,
                "group": joins.group if joins is not None else None,
                "expires": self._expiry(options),
                "reply_to": options.get("reply_to") or self.parent.reply_to,
                **limits,
                "extra": extra,
            },
        )
        self.messages.append(Launched(message, delay))

    def _queue(self, task: str, options: Mapping[str, Any]) -> str:
        named = options.get("queue") or options.get("routing_key")
        if isinstance(named, Mapping):  # a kombu.Queue, as JSON
            named = named.get("name")
        return str(named or self.queue_of(task) or self.parent.queue)

    def _delay(self, options: Mapping[str, Any]) -> float:
        if options.get("countdown"):
            return max(0.0, _seconds("countdown", options["countdown"]))
        if options.get("eta"):
            return max(0.0, read_time("eta", options["eta"]) - self.now)
        return 0.0

    def _expiry(self, options: Mapping[str, Any]) -> float | None:
        expires = options.get("expires")
        if not expires:
            return None
        if isinstance(expires, int | float):
            return self.now + _seconds("expires", expires)
        return read_time("expires", expires)

    def _id(self, seed: str) -> str:
        parent = self.parent
        return str(uuid.uuid5(_NAMESPACE, f"{parent.id}:{parent.generation}:{seed}"))


@dataclass
class _Given(Membership):
    """A place in a chord that Celery gave the task already."""

    def __init__(self, group: str, body: Signature, index: object) -> None:
        super().__init__(group, body)
        self._index = index if isinstance(index, int) else 0

    def next_index(self) -> int:
        """The place that the task has."""
        return self._index


def _seconds(name: str, value: object) -> float:
    """A duration among the options. Raises DecodeError."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise DecodeError(f"{name} of a signature must be a number of seconds")
    if not math.isfinite(value) or abs(value) > LONGEST_RUN:
        raise DecodeError(f"{name} of a signature is out of range")
    return float(value)


def _flat(members: list[Signature], depth: int) -> Iterator[Signature]:
    """The members of a group, those of groups inside it in their place."""
    if depth > DEPTH:
        raise DecodeError(f"signatures are nested more than {DEPTH} levels deep")
    for member in members:
        signature(member, "a group")
        if member.get("subtask_type") == "group":
            yield from _flat(_tasks(member.get("kwargs") or {}), depth + 1)
        else:
            yield member


def _tasks(part: Mapping[str, Any]) -> list[Signature]:
    """The tasks of a chain or a group; a chord's header may hold a group in their place."""
    tasks = part.get("tasks")
    if isinstance(tasks, dict):
        tasks = (signature(tasks, "a header").get("kwargs") or {}).get("tasks")
    return [signature(each, "tasks") for each in _list(tasks)]


def _list(value: object) -> list[Any]:
    if value is None:
        return []
    if isinstance(value, dict):
        return [value]
    if not isinstance(value, list | tuple):
        raise DecodeError(f"a signature holds {type(value).__name__} in the place of a list")
    return list(value)


def _merged(sig: Signature, **options: Any) -> Signature:
    return {**sig, "options": {**(sig.get("options") or {}), **options}}


def _joined(sig: Signature, joins: Membership) -> Signature:
    """The signature with its place in a chord: it joins when it ends."""
    return _merged(sig, chord=joins.body, group_id=joins.group, group_index=joins.next_index())


def _without_membership(sig: Signature) -> Signature:
    """The signature without the place that Celery gave it when it froze the header."""
    options = sig.get("options") or {}
    kept = {
        name: value
        for name, value in options.items()
        if name not in ("chord", "group_id", "group_index")
    }
    return {**sig, "options": kept}


def _with_links(sig: Signature, options: Mapping[str, Any]) -> Signature:
    """The signature with the callbacks and errbacks of the chain, group or chord around it."""
    own = sig.get("options") or {}
    added = {
        name: [*_list(own.get(name)), *(each for each in _list(options.get(name)))]
        for name in ("link", "link_error")
        if options.get(name)
    }
    return _merged(sig, **added) if added else sig
