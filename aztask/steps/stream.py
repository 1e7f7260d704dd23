"""Reads the stream of a task, once for all who listen to it in this process.

Rules
1. A listener that finds nothing new asks the store, unless another listener of the stream asks
   now, or `REMOTE_SECONDS` have not passed since: two requests a second, however many listen.
2. A listener's place is the take and the number of its last part. If that part no longer belongs to
   the stream, the listener gets a reset, and begins with the first part.
3. The end of the task is looked for when a look has found no part; then parts are read once more.
4. A stream has the parts of the run that succeeded. If that run emits none, and an earlier attempt
   that failed has emitted some, listeners get a reset at the end.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Final, Protocol
from weakref import WeakKeyDictionary, WeakValueDictionary

from aztask.errors import ConfigurationError
from aztask.steps.parts import Found, PartStore, Take, place_of
from aztask.stores.records.base import RunKey, RunRecord, State
from aztask.support import clock
from aztask.support.forks import fork_safe_lock

REMOTE_SECONDS: Final = 0.5
LOCAL_SECONDS: Final = 0.1
"""Seconds between two requests of one stream and process."""


@dataclass(frozen=True, slots=True)
class StreamPart:
    """What a stream yields.

    * `value`: what the task emitted.
    * `number`: from 1. `id`: the number with the take that it belongs to, to go on behind it.
    * `reset`: the task began anew; forget the parts before. It has no value, and the number 0.
    """

    value: Any
    number: int
    id: str
    reset: bool = False


RESET: Final = StreamPart(None, 0, "", reset=True)


class StreamRuns(Protocol):
    """The result store, as far as a stream needs it."""

    def get(self, task_id: str) -> RunRecord | None:
        """The latest run of the task."""
        ...

    def wait_changed(self, version: int, timeout: float) -> int:
        """Wait until something may have changed."""
        ...


class Stream:
    """The stream of one task, as this process knows it. Any thread may call."""

    def __init__(self, store: PartStore, runs: StreamRuns, task_id: str) -> None:
        self._store = store
        self._runs = runs
        self._task_id = task_id
        self.seconds = REMOTE_SECONDS if store.remote else LOCAL_SECONDS
        self._lock = fork_safe_lock()
        self._take = Take("")
        self._segments: list[tuple[str, int]] = []  # tokens of takes, and how many came before
        self._parts: list[bytes] = []
        self._look_for_end = self._last_look = False
        self._asked_at = float("-inf")
        self._looking = fork_safe_lock()
        self.record: RunRecord | None = None

    def due(self) -> float:
        """Seconds until this listener has to `look`; 0.0: now."""
        left = self._asked_at + self.seconds - clock.monotonic()
        return max(left, 0.01) if left > 0.0 or self._looking.locked() else 0.0

    def look(self) -> None:
        """Ask the store once, unless another listener does.

        Only here it is known who asks: a listener that is due, and is cancelled before it looks,
        holds up no other. Raises BrokerUnavailable, ResultDamaged.
        """
        if not self._looking.acquire(blocking=False):
            return
        try:
            if self._asked_at + self.seconds > clock.monotonic():
                return  # another one has asked since this one was told
            self._asked_at = clock.monotonic()
            if self._look_for_end and self.record is None:
                record = self._runs.get(self._task_id)
                self._look_for_end = False
                if record is not None and record.state.final:
                    self._last_look, self._asked_at = True, float("-inf")
                else:  # in inline mode it runs what is due, and says if nothing is
                    self._runs.wait_changed(0, 0.0)
                return
            found = self._store.read(self._task_id, self._take.name, len(self._parts))
            base = found.takes[-1].base if found.takes else ""
            if base not in ("", self._take.name) and found.takes[-1].name != self._take.name:
                found = self._store.read(self._task_id)  # a run that goes on was started again
            with self._lock:
                grown = self._add(found)
            self._look_for_end = not grown
            if self._last_look:
                record = self._runs.get(self._task_id)
                if record is not None and record.state is State.SUCCEEDED:
                    self._forget_attempts_before(record.key)
                self.record = record
        finally:
            self._looking.release()

    def _forget_attempts_before(self, key: RunKey) -> None:
        """Drop what an attempt emitted that failed, if the run that succeeded began no take.

        Only the parts before its last wait are its own. Asks the store in this rare case alone.
        """
        if not self._take.name or self._take.name >= place_of(key.generation, key.hop):
            return
        _, kept = self._store.marked(self._task_id)
        with self._lock:
            self._parts = self._parts[:kept]

    def _add(self, found: Found) -> bool:
        newest = found.takes[-1] if found.takes else self._take
        if newest.name != self._take.name:
            takes = {take.name: take for take in found.takes}
            base = takes.get(newest.base)
            if newest.base == self._take.name and newest.base:
                self._parts = self._parts[: newest.kept]
            else:
                self._segments, self._parts = [], []
                if base is not None:
                    self._begin(found, takes, base)
                    self._parts = self._parts[: newest.kept]
            self._take = newest
            self._segments.append((newest.token, len(self._parts)))
        before = len(self._parts)
        self._extend(found, newest.name)
        return len(self._parts) > before

    def _begin(self, found: Found, takes: dict[str, Take], take: Take) -> None:
        """The parts of a take that another one continues, with those that it continues itself."""
        if take.base in takes:
            self._begin(found, takes, takes[take.base])
            self._parts = self._parts[: take.kept]
        self._segments.append((take.token, len(self._parts)))
        self._extend(found, take.name)

    def _extend(self, found: Found, name: str) -> None:
        for number, data in found.parts.get(name, ()):
            if number == len(self._parts) + 1:
                self._parts.append(data)

    def token_of(self, number: int) -> str:
        """The take that a part belongs to; "" if there is none with this number."""
        with self._lock:
            return self._token_of(number)

    def _token_of(self, number: int) -> str:
        if number > len(self._parts):
            return ""
        return next((token for token, first in reversed(self._segments) if first < number), "")

    def behind(self, place: ReadUpTo) -> list[tuple[int, str, bytes]] | None:
        """The parts behind a place: number, take and value; None if there was a reset."""
        with self._lock:
            if place.token and self._segments and self._token_of(place.number) != place.token:
                return None
            return [
                (number, self._token_of(number), self._parts[number - 1])
                for number in range(place.number + 1, len(self._parts) + 1)
            ]


@dataclass(slots=True)
class ReadUpTo:
    """How far a listener has read. `token`: the take of its last part; "" if it is not known."""

    token: str = ""
    number: int = 0

    @classmethod
    def of(cls, after: int | str) -> ReadUpTo:
        """The place behind a part, by its number or its id. Raises ValueError."""
        if isinstance(after, str):
            token, dot, digits = after.rpartition(".")
            if after and not (dot and digits.isascii() and digits.isdecimal()):
                raise ValueError(f"after takes the number or the id of a part, not {after!r}")
            return cls(token, int(digits or 0))
        if isinstance(after, bool) or after < 0:
            raise ValueError(f"after takes a number from 0, not {after!r}")
        return cls("", after)


class Decodes(Protocol):
    """Reads the values of parts."""

    def decode_value(self, data: bytes) -> Any:
        """The value of these bytes. Raises DecodeError if they are damaged."""
        ...


class Listener:
    """One reader of a stream."""

    def __init__(self, stream: Stream, after: int | str, codec: Decodes) -> None:
        self._codec = codec
        self.stream = stream
        self._place = ReadUpTo.of(after)

    def new(self) -> Iterator[StreamPart]:
        """The parts that are known and not yet yielded."""
        found = self.stream.behind(self._place)
        if found is None:
            self._place = ReadUpTo()
            yield RESET
            found = self.stream.behind(self._place) or []
        elif not self._place.token:
            self._place.token = self.stream.token_of(self._place.number)
        for number, token, data in found:
            self._place = ReadUpTo(token, number)
            yield StreamPart(self._codec.decode_value(data), number, f"{token}.{number}")


_streams: Final[WeakKeyDictionary[Any, WeakValueDictionary[str, Stream]]] = WeakKeyDictionary()
_lock: Final = fork_safe_lock()


def stream_of(results: Any, store: PartStore | None, task_id: str) -> Stream:
    """The stream of a task that all listeners of this process share.

    Raises ConfigurationError if the result store keeps no streams.
    """
    if store is None:
        raise ConfigurationError("this result store keeps no streams; use local:// or tables://")
    with _lock:
        streams = _streams.setdefault(results, WeakValueDictionary())
        found = streams.get(task_id)
        if found is None:
            found = streams[task_id] = Stream(store, weakref.proxy(results), task_id)
        return found
