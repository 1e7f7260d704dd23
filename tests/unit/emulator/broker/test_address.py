"""Addresses of entities and nodes."""

from __future__ import annotations

import pytest

from aztask.emulator.broker.entities import Address, parse_address


@pytest.mark.parametrize(
    ("text", "address"),
    [
        ("queue", Address("queue")),
        ("amqps://host:5672/queue", Address("queue")),
        ("amqp://host/a/b", Address("a/b")),
        ("queue/$DeadLetterQueue", Address("queue", dead=True)),
        ("queue/$deadletterqueue/$management", Address("queue", dead=True, management=True)),
        ("queue/$Transfer/$DeadLetterQueue", Address("queue", dead=True, transfer=True)),
        ("t/Subscriptions/s/$management", Address("t/Subscriptions/s", management=True)),
        ("$cbs", Address("", cbs=True)),
        ("$management", Address("", management=True)),
        ("", Address("")),
    ],
)
def test_addresses(text, address):
    assert parse_address(text) == address


def test_a_claimed_path_includes_the_dead_letters():
    assert parse_address("q/$management").claimed == "q"
    assert parse_address("sb://host/q/$DeadLetterQueue").claimed == "q/$deadletterqueue"
