"""How a delivery ends: values that can be printed, compared and recorded. No I/O happens here.

The retry policy returns one, the worker records it, and the broker carries it out. The record is
enough to repeat the settlement exactly: if a recorded attempt is delivered again, it is settled the
same way again.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Final, TypeAlias

from aztask.message.envelope import DEAD_DESCRIPTION, DEAD_REASON, Envelope
from aztask.support.display import mask, storable
from aztask.support.durations import LONGEST_SECONDS

REASON_LIMIT = 1024
"""Characters allowed in a reason and in a description: Service Bus allows 1024 each [measured]."""

LATEST_DUE: Final = 250_000_000_000.0
"""UTC epoch seconds in the year 9892: dates after the year 9998 overflow some services."""


@dataclass(frozen=True, slots=True)
class Complete:
    """The work is done: remove the message."""


@dataclass(frozen=True, slots=True)
class Abandon:
    """Make the message available again at once; the delivery counts toward the delivery limit."""


@dataclass(frozen=True, slots=True)
class Release:
    """Give the message back as if it had not been delivered: the delivery does not count.

    Where the service cannot do that (``Capabilities.release``), the broker abandons instead.
    """


@dataclass(frozen=True, slots=True)
class Defer:
    """Set the message aside: from now on it is received only by its position.

    For a retry, `delay`, `due` and `counted` are those of `Resubmit`. The worker sends the pointer
    that will recall the message *before* it defers; a broker only defers.
    """

    delay: float = 0.0
    due: float | None = None
    counted: bool = True


def _public(text: str) -> str:
    # Masked before the cut, which could leave half a key that no pattern knows.
    return storable(mask(text[: 8 * REASON_LIMIT]), REASON_LIMIT)


@dataclass(frozen=True, slots=True)
class DeadLetter:
    """Move the message to the dead letters.

    Both texts are cut, and escaped where needed, to fit every service. Secrets are masked.
    """

    reason: str
    description: str = ""

    def __post_init__(self) -> None:
        object.__setattr__(self, "reason", _public(self.reason))
        object.__setattr__(self, "description", _public(self.description))


def moved_dead_letter(envelope: Envelope) -> DeadLetter | None:
    """What becomes of a message that was a dead letter elsewhere; None for every other one.

    ``aztask move`` sends dead letters so. Without a key, any sender can mark its own messages; all
    that it wins is that they do not run.
    """
    reason = envelope.headers.get(DEAD_REASON)
    if reason is None:
        return None
    return DeadLetter(str(reason), str(envelope.headers.get(DEAD_DESCRIPTION) or ""))


@dataclass(frozen=True, slots=True)
class Resubmit:
    """Send a clone that becomes available after `delay` seconds, then remove the original.

    * `due`: UTC epoch seconds at which the clone becomes available. It is set when the decision is
      recorded, so that a repeated settlement keeps the time.
    * `counted`: True for a failure (a retry); False for a snooze or an unknown task's grace period.
    * `asked`: True if the task itself set the delay.
    * `envelope`: the clone; set before the settlement goes to a broker.
    """

    delay: float = 0.0
    due: float | None = None
    counted: bool = True
    asked: bool = False
    envelope: Envelope | None = None


@dataclass(frozen=True, slots=True)
class Hold:
    """Keep the lease for `delay` seconds without running the task, then abandon the message.

    `due` is that of `Resubmit`.
    """

    delay: float = 0.0
    due: float | None = None


@dataclass(frozen=True, slots=True)
class Lapse:
    """Settle nothing and stop renewing: the message is available again when its lease ends."""


Settlement: TypeAlias = Complete | Abandon | Release | Defer | DeadLetter | Resubmit
"""The settlements that a broker carries out."""

Decision: TypeAlias = Settlement | Hold | Lapse
"""All decisions of a worker. It carries out `Hold` and `Lapse` itself, without the broker."""

_NAMES: dict[str, type[Any]] = {
    "complete": Complete,
    "abandon": Abandon,
    "release": Release,
    "defer": Defer,
    "dead-letter": DeadLetter,
    "resubmit": Resubmit,
    "hold": Hold,
    "lapse": Lapse,
}
_KINDS = {kind: name for name, kind in _NAMES.items()}


def name_of(settlement: Decision) -> str:
    """The settlement's name in events and tables, such as ``"dead-letter"``."""
    return _KINDS[type(settlement)]


def to_record(settlement: Decision) -> dict[str, Any]:
    """Plain data from which `from_record` makes an equal settlement (without the envelope)."""
    record: dict[str, Any] = {"settle": name_of(settlement)}
    if isinstance(settlement, DeadLetter):
        record.update(reason=settlement.reason, description=settlement.description)
    elif isinstance(settlement, Resubmit):
        record.update(delay=settlement.delay, due=settlement.due, counted=settlement.counted)
        if settlement.asked:
            record.update(asked=True)
    elif isinstance(settlement, Defer):
        record.update(delay=settlement.delay, due=settlement.due, counted=settlement.counted)
    elif isinstance(settlement, Hold):
        record.update(delay=settlement.delay, due=settlement.due)
    return record


def from_record(record: dict[str, Any]) -> Decision:
    """The decision that `to_record` wrote.

    Raises KeyError, TypeError or ValueError for anything else. A record may be damaged or forged,
    and the worker carries out what this returns.
    """
    fields = dict(record)
    kind = _NAMES[fields.pop("settle")]
    for name, value in fields.items():
        if name not in _CHECKS or not _CHECKS[name](value):
            raise TypeError(f"a settlement's {name!r} cannot be {type(value).__name__}")
    settlement: Decision = kind(**fields)
    return settlement


def _within(value: object, most: float) -> bool:
    if isinstance(value, bool) or not isinstance(value, int | float):
        return False
    return 0.0 <= value <= most


_CHECKS: Final[dict[str, Callable[[object], bool]]] = {
    "delay": lambda value: _within(value, LONGEST_SECONDS),
    "due": lambda value: value is None or _within(value, LATEST_DUE),
    "counted": lambda value: isinstance(value, bool),
    "asked": lambda value: isinstance(value, bool),
    "reason": lambda value: isinstance(value, str),
    "description": lambda value: isinstance(value, str),
}


def with_envelope(settlement: Resubmit, envelope: Envelope, delay: float) -> Resubmit:
    """The same decision, ready for a broker: with the clone and the remaining delay."""
    return replace(settlement, envelope=envelope, delay=delay)
