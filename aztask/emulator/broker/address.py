"""Addresses: the text in a terminus names an entity or one of its nodes.

* ``<entity>`` or ``<topic>/Subscriptions/<name>``
* the same followed by ``/$DeadLetterQueue`` or ``/$Transfer/$DeadLetterQueue``
* any of these followed by ``/$management``
* ``$cbs``

Each may follow ``amqp://host/``, ``amqps://host/`` or ``sb://host/``.
"""

from __future__ import annotations

from dataclasses import dataclass
from urllib.parse import unquote, urlsplit

CBS = "$cbs"
MANAGEMENT = "/$management"
DEAD_LETTERS = "/$deadletterqueue"
TRANSFER = "/$transfer"


@dataclass(frozen=True, slots=True)
class Address:
    """A parsed address.

    entity: the entity's path. dead: its dead letters. transfer: its transfer dead letters.
    management: its management node. cbs: the token node.
    """

    entity: str
    dead: bool = False
    transfer: bool = False
    management: bool = False
    cbs: bool = False

    @property
    def claimed(self) -> str:
        """The path that a token must cover.

        It includes the dead letters, because SDKs put a token for these alone to receive them.
        """
        return self.entity + TRANSFER * self.transfer + DEAD_LETTERS * self.dead


def parse_address(text: str) -> Address:
    """Parse an address. Any text is valid: it may name an entity that does not exist."""
    path = urlsplit(text).path if "://" in text else text
    path = unquote(path).strip("/")
    if path.lower() == CBS:
        return Address("", cbs=True)
    path, management = _without(path, MANAGEMENT)
    if path.lower() == MANAGEMENT[1:]:
        return Address("", management=True)
    path, dead = _without(path, DEAD_LETTERS)
    path, transfer = _without(path, TRANSFER) if dead else (path, False)
    return Address(path, dead, transfer, management)


def _without(path: str, suffix: str) -> tuple[str, bool]:
    if path.lower().endswith(suffix):
        return path[: -len(suffix)], True
    return path, False
