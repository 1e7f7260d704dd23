"""Queues, subscriptions and keys as the management client takes them: values by name."""

from __future__ import annotations

from enum import StrEnum
from types import SimpleNamespace


class SBQueue(SimpleNamespace):
    """A queue's settings."""


class SBSubscription(SimpleNamespace):
    """A subscription's settings."""


class SBAuthorizationRule(SimpleNamespace):
    """A key's rights."""


class AccessRights(StrEnum):
    """What a key is good for."""

    manage = "Manage"
    send = "Send"
    listen = "Listen"
