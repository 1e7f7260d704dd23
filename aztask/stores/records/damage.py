"""Read stored rows without trusting them: a row that a store would not write raises `Damaged`.

Rules
1. A column that is missing, of another type or out of range makes the row unreadable. So do columns
   that contradict each other: acting on such a row could lose a task or run it twice.
2. A reason names the column and the type found, never the value: values may be secrets. Only an
   unknown state is quoted.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, Final

import msgpack

from aztask.message.headers import TIME_LIMIT
from aztask.queues.delivery import Position
from aztask.settlement import Decision, from_record
from aztask.stores.records.base import KEPT_STARTS, NO_STARTS, EarlierStart, EarlierStarts, State
from aztask.support.display import one_line

COUNT_LIMIT: Final = 10**9
"""No run starts or fails this often, and a larger number might overflow when it is raised."""
REASON_LIMIT: Final = 200
KEPT: Final = (
    "the result store's row of task %s (generation %d, hop %d) cannot be read: %s. It is kept: "
    "aztask result --state unreadable"
)
"""The log line of a store, once for each row, with the key's parts and the reason."""
_WAITING: Final = frozenset({State.PENDING, State.STARTED})


class Damaged(Exception):
    """A row or a value is not what a store writes. Its text is the reason, on one line."""

    def __init__(self, reason: str) -> None:
        super().__init__(one_line(reason, REASON_LIMIT))

    @property
    def reason(self) -> str:
        """The reason, on one line."""
        return str(self)


class Columns:
    """The columns of one row by name; each method reads one of them, or raises Damaged."""

    def __init__(self, values: Mapping[str, Any]) -> None:
        self._values = values

    def text(self, name: str, *, missing: str | None = None) -> str:
        """Read a text. `missing` is the value of a column that does not exist."""
        value = self._values.get(name)
        if value is None and missing is not None:
            return missing
        if not isinstance(value, str):
            raise _wrong(name, value, "text")
        return value

    def count(self, name: str, *, missing: int | None = None, most: int = COUNT_LIMIT) -> int:
        """Read a number from 0 to `most`."""
        value = self._values.get(name)
        if value is None and missing is not None:
            return missing
        if isinstance(value, bool) or not isinstance(value, int):
            raise _wrong(name, value, "a whole number")
        if not 0 <= value <= most:
            raise Damaged(f"its {name} is out of range")
        return value

    def flag(self, name: str) -> bool:
        """Read a column that is true or false."""
        value = self._values.get(name)
        if not isinstance(value, bool):
            raise _wrong(name, value, "true or false")
        return value

    def time(self, name: str) -> float:
        """Read UTC epoch seconds, or a duration in seconds."""
        found = self.optional_time(name)
        if found is None:
            raise _wrong(name, None, "a time")
        return found

    def optional_time(self, name: str) -> float | None:
        """Read a time or a duration; None if the column is empty."""
        value = self._values.get(name)
        if value is None:
            return None
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise _wrong(name, value, "a time")
        if not math.isfinite(value) or not -TIME_LIMIT < value < TIME_LIMIT:
            raise Damaged(f"its {name} is out of range")
        return float(value)

    def data(self, name: str) -> bytes | None:
        """Read bytes; None if the column is empty."""
        value = self._values.get(name)
        if value is not None and not isinstance(value, bytes):
            raise _wrong(name, value, "bytes")
        return value

    def texts(self, name: str) -> tuple[str, ...]:
        """Read a list of texts."""
        value = self._values.get(name)
        if not isinstance(value, list) or not all(isinstance(each, str) for each in value):
            raise _wrong(name, value, "a list of texts")
        return tuple(value)

    def starts(self, name: str = "earlier") -> EarlierStarts:
        """Read the earlier starts of a run; none if the column is empty."""
        found = self.unpacked(name)
        if found is None:
            return NO_STARTS
        if not isinstance(found, list) or len(found) != 2 or not isinstance(found[1], list):
            raise Damaged(f"its {name} is no list of starts")
        dropped, rows = found
        kept = tuple(_start(row, name) for row in rows[-KEPT_STARTS:])
        return EarlierStarts(kept, Columns({"number": dropped}).count("number"))

    def position(self, name: str = "position") -> Position | None:
        """Read a message's position; None if the column is empty."""
        value = self._values.get(name)
        if value is None or (isinstance(value, int | str) and not isinstance(value, bool)):
            return value
        raise _wrong(name, value, "a number or text")

    def unpacked(self, name: str) -> Any:
        """Read and unpack a msgpack value; None if the column is empty."""
        data = self.data(name)
        return None if data is None else unpacked(data, name)

    def state(self, name: str = "state") -> State:
        """Read a state that a store may write."""
        text = self.text(name)
        try:
            state = State(text)
        except ValueError:
            state = State.UNREADABLE
        if state is State.UNREADABLE:
            raise Damaged(f"its state {text[:40]!r} is unknown; a newer aztask may know it")
        return state

    def settlement(self, name: str = "settlement") -> Decision | None:
        """Read a recorded settlement; None if the column is empty."""
        data = self.data(name)
        if data is None:
            return None
        try:
            return from_record(unpacked(data, name))
        except (KeyError, TypeError, ValueError):
            raise Damaged(f"its {name} is unknown or wrong; a newer aztask may know it") from None


def _start(row: Any, name: str) -> EarlierStart:
    if not isinstance(row, list) or len(row) < len(_START):
        raise Damaged(f"its {name} is no list of starts")
    fields = Columns(dict(zip(_START, row, strict=False)))
    return EarlierStart(
        fields.time("at"), fields.text("worker"), fields.text("end"), fields.text("error")
    )


_START: Final = ("at", "worker", "end", "error")


def unpacked(data: bytes, what: str) -> Any:
    """The msgpack value in `data`. `what` names it in the reason. Raises Damaged."""
    try:
        return msgpack.unpackb(data, unicode_errors="surrogatepass", strict_map_key=False)
    except (ValueError, TypeError, msgpack.UnpackException, RecursionError):
        raise Damaged(f"its {what} cannot be decoded ({len(data)} bytes)") from None


def check_ends(state: State, ended_at: float | None, settlement: Decision | None) -> None:
    """Check that a waiting or running run has no end and no settlement, and any other has an end.

    Raises Damaged.
    """
    if (ended_at is None) != (state in _WAITING):
        end = "no end" if ended_at is None else "an end"
        raise Damaged(f"its state is {state.value}, but it has {end}")
    if ended_at is None and settlement is not None:
        raise Damaged(f"its state is {state.value}, but it has a settlement")


def check_owner(owner: str | None, position: Position | None) -> None:
    """Check that an owned run names the message it is owned for. Raises Damaged."""
    if owner and position is None:
        raise Damaged("it has an owner, but no position")


def check_position(position: Position | None, of_message: Position) -> None:
    """Check that both positions are of one type, as all of one broker are. Raises Damaged.

    A position of another type would look like another copy of the message, and this message would
    be dropped.
    """
    if position is not None and type(position) is not type(of_message):
        raise _wrong("position", position, type(of_message).__name__)


def _wrong(name: str, value: object, expected: str) -> Damaged:
    if value is None:
        return Damaged(f"its {name} is missing")
    return Damaged(f"its {name} is {type(value).__name__}, not {expected}")
