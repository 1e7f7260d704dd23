"""The members of Celery's chords: each notes its end in the result store, the last one is told.

Rules
1. A chord is a set of documents in the result store: ``chord`` has its size and the places
   of the members that have ended; ``part-N`` has the value of one member. A member that another
   one has added (`add_to_chord`) comes with the other's index, so its place follows from its id.
2. Every change is compare-and-set, and a member's place is set once: a member that ends twice
   counts once. So no chord is polled, and no counter can be raised twice.
3. The documents are deleted `result_retention` after the chord was started, by the housekeeping of
   aztask's workers.

Crash windows: before the place is set nothing happened; the redelivery repeats it. After it, the
redelivery of the last member finds all places set, and the body is sent again under the same id.
"""

from __future__ import annotations

import random
import time
import zlib
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Final

import msgpack

from aztask.errors import BrokerUnavailable
from aztask.stores.records.damage import Columns, Damaged
from aztask.stores.records.workflows import Document, DocumentChange, ListedWorkflow, WorkflowStore

VERSION: Final = 1
DOCUMENT: Final = "chord"
TRIES: Final = 40
FIRST_PAUSE: Final = 0.004
LONGEST_PAUSE: Final = 0.25
_WITHOUT_PLACE: Final = 1_000_000


@dataclass(frozen=True, slots=True)
class ChordPart:
    """The end of a member.

    * `index`: its place in the header.
    * `value`: the encoded value of a success, else None.
    * `error`: what went wrong, as ``Type: text``.
    """

    index: int
    task_id: str
    value: bytes | None
    error: str = ""


@dataclass(frozen=True, slots=True)
class ChordState:
    """A chord after a change.

    * `size`: None until it is known.
    * `ended`: the places of the members that have ended.
    * `sent`: the body was sent, or its failure was recorded.
    * `added`: the ids of members beside its size.
    * `parts`: the ends of the members, once it is full.
    """

    size: int | None
    ended: frozenset[int]
    sent: bool = False
    added: frozenset[str] = frozenset()
    parts: tuple[ChordPart, ...] = ()

    @property
    def full(self) -> bool:
        """True if all members have ended."""
        return self.size is not None and len(self.ended) >= self.size + len(self.added)


class Chords:
    """The chords in one result store. Any thread may call."""

    def __init__(
        self,
        store: WorkflowStore,
        clock: Callable[[], float] = time.time,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        """clock: gives UTC epoch seconds. sleep: waits for that many seconds."""
        self._store = store
        self._clock = clock
        self._sleep = sleep

    def start(self, group: str, size: int | None = None) -> ChordState:
        """Note a chord before its members are sent. Idempotent.

        * `size`: the number of members, if it is known yet; call again when it is.

        Raises BrokerUnavailable.
        """
        name, now = chord_name(group), self._clock()
        # Listed as ended now, so that rule 3 holds whatever becomes of its members.
        self._store.close_workflow(name, now, now)
        state: ChordState = self._change(group, lambda found: _started(found, size))
        return state

    def note_sent(self, group: str) -> None:
        """Note that the body was sent, so that a repeated end does not send it again."""
        self._change(group, lambda found: None if found is None else replace(found, sent=True))

    def add(self, group: str, task_id: str) -> None:
        """Note a further member, before it is sent; it ends a chord that is not full yet."""
        self._change(group, lambda found: _with_member(found, task_id))

    def known(self, group: str) -> bool:
        """Whether the chord was started in this store."""
        return self._store.read([(chord_name(group), DOCUMENT)])[0] is not None

    def ended(self, group: str, part: ChordPart) -> ChordState | None:
        """Note the end of a member; the state has all parts if it is full now.

        None if the chord is not known here: it was deleted, or started with another store.
        """
        name = chord_name(group)
        known = self._store.read([(name, DOCUMENT)])[0]
        if known is None:
            return None
        if part.task_id in _read(known.data).added:
            part = replace(part, index=place_of(part.task_id))
        # Written before the place is set. A member that ends again keeps its first end.
        self._store.write([DocumentChange(name, _part_name(part.index), _packed_part(part))])
        state = self._change(group, lambda found: _with_end(found, part.index), known)
        if state is None:
            self._store.delete_workflow(ListedWorkflow(name, 0.0))
            return None
        return self._with_parts(group, state)

    def state(self, group: str) -> ChordState | None:
        """The chord as it is now, with its parts if it is full."""
        found = self._store.read([(chord_name(group), DOCUMENT)])[0]
        return None if found is None else self._with_parts(group, _read(found.data))

    def _with_parts(self, group: str, state: ChordState) -> ChordState:
        if not state.full:
            return state
        name, indexes = chord_name(group), sorted(state.ended)
        found = self._store.read([(name, _part_name(index)) for index in indexes])
        parts = [
            _read_part(index, each.data) if each is not None else ChordPart(index, "", None, "lost")
            for index, each in zip(indexes, found, strict=True)
        ]
        return replace(state, parts=tuple(parts))

    def _change(
        self,
        group: str,
        change: Callable[[ChordState | None], ChordState | None],
        known: Document | None = None,
    ) -> Any:
        """The state after `change`, written unless it is equal; None if `change` returns None.

        * `known`: the document as it was read before; tried first, which saves reading it.
        """
        name, pause = chord_name(group), FIRST_PAUSE
        for _ in range(TRIES):
            found, known = known or self._store.read([(name, DOCUMENT)])[0], None
            before = None if found is None else _read(found.data)
            after = change(before)
            if after is None or after == before:
                return after
            tag = None if found is None else found.tag
            if (
                self._store.write([DocumentChange(name, DOCUMENT, _packed(after), tag)])[0]
                is not None
            ):
                return after
            self._sleep(random.uniform(0.0, pause))  # noqa: S311  # only spreads the writers
            pause = min(2 * pause, LONGEST_PAUSE)
        raise BrokerUnavailable(f"other workers keep changing chord {group}; it is tried again")


def chord_name(group: str) -> str:
    """The name under which the documents of a chord are kept."""
    return f"celery-chord-{group}"


def place_of(task_id: str) -> int:
    """The place of a member that has none of its own in the header: behind all others."""
    return _WITHOUT_PLACE + zlib.crc32(task_id.encode())


def _part_name(index: int) -> str:
    return f"part-{index}"


def _started(found: ChordState | None, size: int | None) -> ChordState:
    if found is None:
        return ChordState(size, frozenset())
    return found if size is None else replace(found, size=size)


def _with_member(found: ChordState | None, task_id: str) -> ChordState:
    state = _started(found, None)
    return replace(state, added=state.added | {task_id})


def _with_end(found: ChordState | None, index: int) -> ChordState | None:
    return None if found is None else replace(found, ended=found.ended | {index})


def _packed(state: ChordState) -> bytes:
    values = [VERSION, state.size, sorted(state.ended), state.sent]
    # Without further members, a worker of an earlier release reads it.
    packed: bytes = msgpack.packb([*values, sorted(state.added)] if state.added else values)
    return packed


def _read(data: bytes) -> ChordState:
    found = Columns({"chord": data}).unpacked("chord")
    if not isinstance(found, list) or len(found) not in (4, 5) or found[0] != VERSION:
        raise Damaged("the document of a chord is unknown or wrong; a newer aztask may know it")
    _, size, ended, sent = found[:4]
    added = found[4] if len(found) == 5 else []
    if not (size is None or type(size) is int) or not isinstance(sent, bool):
        raise Damaged("the document of a chord has no size")
    if not isinstance(ended, list) or not all(type(each) is int for each in ended):
        raise Damaged("the document of a chord lists no members")
    if not isinstance(added, list) or not all(isinstance(each, str) for each in added):
        raise Damaged("the document of a chord names no further members")
    return ChordState(size, frozenset(ended), sent, frozenset(added))


def _packed_part(part: ChordPart) -> bytes:
    packed: bytes = msgpack.packb([VERSION, part.task_id, part.value, part.error])
    return packed


def _read_part(index: int, data: bytes) -> ChordPart:
    found = Columns({"part": data}).unpacked("part")
    if not isinstance(found, list) or len(found) != 4 or found[0] != VERSION:
        raise Damaged("the value of a chord's member is unknown or wrong")
    _, task_id, value, error = found
    texts = isinstance(task_id, str) and isinstance(error, str)
    if not texts or not (value is None or isinstance(value, bytes)):
        raise Damaged("the value of a chord's member is damaged")
    return ChordPart(index, task_id, value, error)
