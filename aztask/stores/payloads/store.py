"""Where payloads are stored: the protocol of the stores, and the names of payloads.

Rules
1. A payload is written once, under a name that no other one has, before the message or the record
   that refers to it. It appears completely or not at all. So writing it again after a lost answer
   does no harm.
2. A name is ``KIND/HOUR/ID``. The hour in which it was written says how old a payload is, so that
   old ones are found without reading them. In the 32 digits of an ID, the first 8 stand for the
   broker (rule 5), the next 8 for the owner (rule 3), then come `OWNED` and 12 random digits.
   Releases before that wrote 32 random digits: such payloads are removed by the task that refers to
   them. One in 65,536 of those names looks like a new one of another task, and is collected later.
3. A task owns its arguments and its checkpoints: the name carries the task's id, and only the end
   of that task removes them. Results and values of `App.put` follow their own lifetimes, whatever
   refers to them.
4. A store raises PayloadMissing and PayloadDamaged for one payload, and BrokerUnavailable if the
   store itself cannot be used now.
5. The broker's digits (`aztask.address.owner`) let apps with brokers of their own share a store:
   each removes its own payloads. Releases before that read these names, too.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from enum import StrEnum
from hashlib import sha256
from typing import Final, Protocol

from aztask.errors import PayloadMissing
from aztask.message.payload import StoredValue
from aztask.support import chance, clock

_HOUR: Final = "%Y%m%d%H"
OWNED: Final = "a27a"
"""The digits of a name that tell that it carries its broker and its owner."""

_BROKER_DIGITS: Final = 8
_OWNER_DIGITS: Final = 8
_NO_BROKER: Final = "0" * _BROKER_DIGITS
NAME: Final = re.compile(r"[a-z]{1,16}/([0-9]{10})/[0-9a-f]{32}(\.part)?", re.ASCII)
"""A payload's name; with ``.part`` at its end, it was not written completely."""


class PayloadKind(StrEnum):
    """What a payload is: the first part of its name."""

    ARGUMENTS = "args"
    CHECKPOINT = "saved"
    RESULT = "results"
    """Of a task, or of a member of a workflow, whose results live as long as the workflow."""
    VALUE = "values"
    """Stored by `App.put`. The hour in its name is that in which its lifetime ends."""


@dataclass(frozen=True, slots=True)
class ListedPayload:
    """A payload that is stored. at: the hour in its name, UTC epoch seconds; size: bytes."""

    name: str
    size: int
    at: float

    @property
    def kind(self) -> str:
        """The first part of its name, one of `PayloadKind`."""
        return self.name.partition("/")[0]

    @property
    def owner(self) -> str:
        """The digits of its owner, see `owner_digits`; "" if an older release has named it."""
        return _parts(self.name)[1]


class PayloadStore(Protocol):
    """Stores payloads. Any thread may call; a forked child opens its own."""

    @property
    def remote(self) -> bool:
        """True if calls wait for a network."""
        ...

    def write(self, name: str, data: bytes) -> None:
        """Store `data`. Raises BrokerUnavailable: then it may be stored or not."""
        ...

    def read(self, stored: StoredValue) -> bytes:
        """The bytes, which are verified. Never reads more than `stored` says."""
        ...

    def copy(self, listed: ListedPayload) -> bytes | None:
        """The bytes of a listed payload as they are, unverified; None if it is gone.

        Raises BrokerUnavailable.
        """
        ...

    def remove(self, names: Sequence[str]) -> None:
        """Remove these; missing ones are skipped. Raises BrokerUnavailable."""
        ...

    def list(self) -> Iterator[ListedPayload]:
        """All payloads; files and blobs with other names are skipped. Raises BrokerUnavailable."""
        ...

    def close(self) -> None:
        """Close idle connections; the store stays usable."""
        ...


def new_name(kind: PayloadKind, at: float | None = None, owner: str = "", mark: str = "") -> str:
    """A new payload's name.

    * `at`: UTC epoch seconds, by default now.
    * `owner`: the id of the task, or of the workflow for a member's result; "" for `App.put`.
    * `mark`: that of the broker (`aztask.address.owner.Owner.mark`); "" without one.
    """
    hour = datetime.fromtimestamp(clock.wall() if at is None else at, UTC).strftime(_HOUR)
    broker, random = mark[:_BROKER_DIGITS] or _NO_BROKER, chance.token(6)
    return f"{kind}/{hour}/{broker}{owner_digits(owner)}{OWNED}{random}"


def owner_digits(owner: str) -> str:
    """What a name carries of its owner's id: 8 hexadecimal digits of its SHA-256."""
    text = owner.encode("utf-8", "surrogatepass")
    return sha256(text).hexdigest()[:_OWNER_DIGITS]


def belongs(name: str, task_id: str) -> bool:
    """True if the end of this task removes the payload of that name: see rule 3.

    Only arguments and checkpoints belong to a task. Of a name without an owner, the task that
    refers to it is taken for the owner.
    """
    if name.partition("/")[0] not in (PayloadKind.ARGUMENTS, PayloadKind.CHECKPOINT):
        return False
    return _parts(name)[1] in ("", owner_digits(task_id))


def may_remove(name: str, mark: str) -> bool:
    """True unless the payload of this name belongs to another broker than that of `mark`."""
    broker = broker_in(name)
    return not broker or not mark or broker == mark[:_BROKER_DIGITS]


def broker_in(name: str) -> str:
    """The first digits of the broker's mark; "" if the name does not say whose payload it is."""
    broker = _parts(name)[0]
    return "" if broker == _NO_BROKER else broker


def _parts(name: str) -> tuple[str, str]:
    """(the broker's digits, the owner's digits) of a name; both "" in one of an older release."""
    digits = name.rpartition("/")[2]
    both = _BROKER_DIGITS + _OWNER_DIGITS
    if not digits[both:].startswith(OWNED):
        return "", ""
    return digits[:_BROKER_DIGITS], digits[_BROKER_DIGITS:both]


def listed(name: str, size: int) -> ListedPayload | None:
    """The payload of this name; None if it is not a payload's name."""
    found = NAME.fullmatch(name)
    if found is None:
        return None
    try:
        at = datetime.strptime(found[1], _HOUR).replace(tzinfo=UTC)
    except ValueError:
        return None
    return ListedPayload(name, size, at.timestamp())


# -- payloads in memory, for the inline mode of tests --------------------------------------


class MemoryPayloads:
    """A store that ends with its process; see `aztask.stores.payloads.store.PayloadStore`."""

    remote = False

    def __init__(self) -> None:
        self.stored: dict[str, bytes] = {}

    def __repr__(self) -> str:
        return "<MemoryPayloads>"

    def write(self, name: str, data: bytes) -> None:
        """Store `data` until this process ends."""
        self.stored[name] = data

    def read(self, stored: StoredValue) -> bytes:
        """The bytes that were kept. Raises PayloadMissing, PayloadDamaged."""
        data = self.stored.get(stored.name)
        if data is None:
            raise PayloadMissing(f"the payload {stored.name} is gone")
        stored.verify(data)
        return data

    def copy(self, listed: ListedPayload) -> bytes | None:
        """The bytes that were kept, or None."""
        return self.stored.get(listed.name)

    def remove(self, names: Sequence[str]) -> None:
        """Forget these payloads; missing ones are skipped."""
        for name in names:
            self.stored.pop(name, None)

    def list(self) -> Iterator[ListedPayload]:
        """All payloads that are stored now."""
        found = (listed(name, len(data)) for name, data in list(self.stored.items()))
        return (each for each in found if each is not None)

    def close(self) -> None:
        """Keep everything: the app may be used again."""
