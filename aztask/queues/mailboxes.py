"""Mailboxes: queues of one process that get a copy of what is published to an exchange.

Remote control of Celery's workers, its events, and broadcasts need them: a message goes to every
process that listens, and the sender does not know which ones do.

Rules
1. A mailbox belongs to the process that opened it. Opening it again from time to time keeps it. One
   that was not opened for `Mailboxes.lifetime` seconds is removed with its messages.
2. Messages in a mailbox are copies for listeners, not work: they expire after `MESSAGE_SECONDS`.
3. An exchange is a name. It exists where a mailbox is bound to it, in any process.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import sha256
from typing import Final, Protocol, runtime_checkable

from aztask.message.envelope import Envelope
from aztask.queues.base import Receiver

PREFIX: Final = "aztask-mailbox-"
"""Names of queues that are mailboxes begin so, and are not listed among the queues."""

MESSAGE_SECONDS: Final = 300.0

EXCHANGE: Final = "aztask-exchange"
ROUTING_KEY: Final = "aztask-routing-key"
"""Headers that tell a listener where a message was published. They are removed on arrival."""


@dataclass(frozen=True, slots=True, order=True)
class Binding:
    """What a mailbox gets copies of.

    * `kind`: ``fanout`` (everything that is published to the exchange), ``direct`` (the same key)
      or ``topic`` (`key` is a pattern of words: ``*`` is one word, ``#`` any number of words).
    """

    exchange: str
    key: str = ""
    kind: str = "fanout"

    def matches(self, exchange: str, key: str) -> bool:
        """True if a message with `key` that is published to `exchange` belongs into the mailbox."""
        if exchange != self.exchange:
            return False
        if self.kind == "topic":
            return _fits(_words(self.key), _words(key))
        return self.kind == "fanout" or key == self.key


def _words(key: str) -> tuple[str, ...]:
    return tuple(key.split(".")) if key else ()


def _fits(pattern: tuple[str, ...], words: tuple[str, ...]) -> bool:
    """True if the words fit the pattern of a topic exchange (AMQP 0-9-1, section 3.1.3.3)."""
    if not pattern:
        return not words
    first, rest = pattern[0], pattern[1:]
    if first == "#":
        return any(_fits(rest, words[number:]) for number in range(len(words) + 1))
    return bool(words) and first in ("*", words[0]) and _fits(rest, words[1:])


def queue_name(mailbox: str) -> str:
    """The name of a mailbox's queue: `mailbox` may hold any characters, a queue's name may not."""
    return PREFIX + sha256(mailbox.encode("utf-8", "surrogatepass")).hexdigest()[:32]


class Mailboxes(Protocol):
    """The mailboxes of one broker. Any thread may call."""

    @property
    def lifetime(self) -> float:
        """Seconds after which a mailbox is removed that was not opened again."""
        ...

    def open(self, name: str, bindings: Sequence[Binding]) -> None:
        """Create the mailbox or keep it, with exactly these bindings.

        Raises ConfigurationError without the permission to create queues, and BrokerUnavailable.
        """
        ...

    def receiver(self, name: str, *, delete: bool) -> Receiver:
        """A receiver of the mailbox. delete: messages are deleted when they are received."""
        ...

    def publish(self, exchange: str, key: str, envelope: Envelope, *, recent: bool = False) -> bool:
        """Send a copy to each mailbox that is bound for it; False if there certainly is none.

        recent: it may use what it knew some seconds ago. For events, which are many, and for which
        no caller waits.
        """
        ...

    def delete(self, name: str) -> None:
        """Remove the mailbox with its messages; nothing happens if there is none."""
        ...


@runtime_checkable
class Broadcaster(Protocol):
    """A broker that has mailboxes."""

    def mailboxes(self) -> Mailboxes:
        """The mailboxes of this broker."""
        ...
