"""Addresses: what the text in a terminus means.

Understood, with or without ``amqp[s]://host/`` or ``sb://host/`` before it: ``<entity>``,
``<topic>/Subscriptions/<name>``, either with ``/$DeadLetterQueue`` or
``/$Transfer/$DeadLetterQueue`` behind, all of them with ``/$management`` behind; and ``$cbs``.
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
    """entity: its path. dead: its dead letters. management: its requests. cbs: the token node."""

    entity: str
    dead: bool = False
    transfer: bool = False
    management: bool = False
    cbs: bool = False

    @property
    def claimed(self) -> str:
        """What a token has to cover: SDKs show one for the dead letters alone to receive those."""
        return self.entity + TRANSFER * self.transfer + DEAD_LETTERS * self.dead


def parse_address(text: str) -> Address:
    """What an address means; an address of nothing is an entity that does not exist."""
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
