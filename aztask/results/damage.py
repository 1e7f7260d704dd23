"""Reads stored rows without trusting them: what is not as a store writes it is `Damaged`.

Rules
1. A column that is missing, of another type or out of range makes the whole row unreadable. Columns
   that contradict each other do too: acting on such a row could lose a task or run it twice.
2. A reason names the column and the type found, never the value: values may be secrets. Only an
   unknown state is quoted.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, Final

import msgpack

from aztask.brokers.delivery import Position
from aztask.message.headers import TIME_LIMIT
from aztask.results.base import State
from aztask.settlement import Decision, from_record
from aztask.support.display import one_line

COUNT_LIMIT: Final = 10**9
"""No run starts or fails so often, and a number beyond it may not fit when it is counted up."""
REASON_LIMIT: Final = 200
KEPT: Final = (
    "the result store's row of task %s (generation %d, hop %d) cannot be read: %s. It is kept: "
    "aztask result --state unreadable"
)
"""What a store logs, once for each row, with the key's parts and the reason."""
_WAITING: Final = frozenset({State.PENDING, State.STARTED})


class Damaged(Exception):
    """A row or a value is not what a store writes. Its text is the reason, on one line."""

    def __init__(self, reason: str) -> None:
        super().__init__(one_line(reason, REASON_LIMIT))

    @property
    def reason(self) -> str:
        """What is wrong."""
        return str(self)


class Columns:
    """The columns of one row by name; each method reads one, or raises Damaged."""

    def __init__(self, values: Mapping[str, Any]) -> None:
        self._values = values

    def text(self, name: str, *, missing: str | None = None) -> str:
        """Text. missing: what stands for a column that is not there."""
        value = self._values.get(name)
        if value is None and missing is not None:
            return missing
        if not isinstance(value, str):
            raise _wrong(name, value, "text")
        return value

    def count(self, name: str, *, missing: int | None = None, most: int = COUNT_LIMIT) -> int:
        """A number from 0 to `most`."""
        value = self._values.get(name)
        if value is None and missing is not None:
            return missing
        if isinstance(value, bool) or not isinstance(value, int):
            raise _wrong(name, value, "a whole number")
        if not 0 <= value <= most:
            raise Damaged(f"its {name} is out of range")
        return value

    def flag(self, name: str) -> bool:
        """True or False."""
        value = self._values.get(name)
        if not isinstance(value, bool):
            raise _wrong(name, value, "true or false")
        return value

    def time(self, name: str) -> float:
        """UTC epoch seconds, or a duration in seconds."""
        found = self.optional_time(name)
        if found is None:
            raise _wrong(name, None, "a time")
        return found

    def optional_time(self, name: str) -> float | None:
        """As `time`; None where there is none."""
        value = self._values.get(name)
        if value is None:
            return None
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise _wrong(name, value, "a time")
        if not math.isfinite(value) or not -TIME_LIMIT < value < TIME_LIMIT:
            raise Damaged(f"its {name} is out of range")
        return float(value)

    def data(self, name: str) -> bytes | None:
        """Bytes, None where there are none."""
        value = self._values.get(name)
        if value is not None and not isinstance(value, bytes):
            raise _wrong(name, value, "bytes")
        return value

    def texts(self, name: str) -> tuple[str, ...]:
        """A list of texts."""
        value = self._values.get(name)
        if not isinstance(value, list) or not all(isinstance(each, str) for each in value):
            raise _wrong(name, value, "a list of texts")
        return tuple(value)

    def position(self, name: str = "position") -> Position | None:
        """Where a message lies; None where nothing is there."""
        value = self._values.get(name)
        if value is None or (isinstance(value, int | str) and not isinstance(value, bool)):
            return value
        raise _wrong(name, value, "a number or text")

    def unpacked(self, name: str) -> Any:
        """What was packed in it; None where nothing is there."""
        data = self.data(name)
        return None if data is None else unpacked(data, name)

    def state(self, name: str = "state") -> State:
        """A state that a store writes."""
        text = self.text(name)
        try:
            state = State(text)
        except ValueError:
            state = State.UNREADABLE
        if state is State.UNREADABLE:
            raise Damaged(f"its state {text[:40]!r} is unknown; a newer aztask may know it")
        return state

    def settlement(self, name: str = "settlement") -> Decision | None:
        """How its message was to be settled; None where nothing is there."""
        data = self.data(name)
        if data is None:
            return None
        try:
            return from_record(unpacked(data, name))
        except (KeyError, TypeError, ValueError):
            raise Damaged(f"its {name} is unknown or wrong; a newer aztask may know it") from None


def unpacked(data: bytes, what: str) -> Any:
    """The value in `data`. what: how a reason calls it. Raises Damaged."""
    try:
        return msgpack.unpackb(data, unicode_errors="surrogatepass", strict_map_key=False)
    except (ValueError, TypeError, msgpack.UnpackException, RecursionError):
        raise Damaged(f"its {what} cannot be decoded ({len(data)} bytes)") from None


def check_ends(state: State, ended_at: float | None, settlement: Decision | None) -> None:
    """A run that waits or runs has no end and no settlement, any other has an end.

    Raises Damaged.
    """
    if (ended_at is None) != (state in _WAITING):
        end = "no end" if ended_at is None else "an end"
        raise Damaged(f"its state is {state.value}, but it has {end}")
    if ended_at is None and settlement is not None:
        raise Damaged(f"its state is {state.value}, but it has a settlement")


def check_owner(owner: str | None, position: Position | None) -> None:
    """A run that is owned names the message it is owned for. Raises Damaged."""
    if owner and position is None:
        raise Damaged("it has an owner, but no position")


def check_position(position: Position | None, of_message: Position) -> None:
    """Positions of one broker are of one type. Another one would be taken for another copy of the
    message, and this one would be dropped. Raises Damaged.
    """
    if position is not None and type(position) is not type(of_message):
        raise _wrong("position", position, type(of_message).__name__)


def _wrong(name: str, value: object, wanted: str) -> Damaged:
    if value is None:
        return Damaged(f"its {name} is missing")
    return Damaged(f"its {name} is {type(value).__name__}, not {wanted}")
