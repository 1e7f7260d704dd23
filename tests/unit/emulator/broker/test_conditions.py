"""Error conditions of the service."""

from __future__ import annotations

import pytest

from aztask.emulator.broker.conditions import MESSAGE_LOCK_LOST, as_amqp, status_of
from aztask.emulator.broker.namespace import EntityExists
from aztask.errors import (
    AztaskError,
    BrokerUnavailable,
    ConfigurationError,
    LeaseLost,
    QueueFull,
    QueueNotFound,
)


@pytest.mark.parametrize(
    ("error", "condition", "status"),
    [
        (QueueFull("x"), "amqp:resource-limit-exceeded", 403),
        (QueueNotFound("x"), "amqp:not-found", 404),
        (BrokerUnavailable("x"), "com.microsoft:server-busy", 503),
        (LeaseLost("x"), "com.microsoft:session-lock-lost", 410),
        (ConfigurationError("x"), "amqp:not-allowed", 400),
        (EntityExists("x"), "amqp:not-allowed", 400),
        (AztaskError("x"), "amqp:internal-error", 500),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, Exception) else "",
)
def test_errors_have_a_condition_and_a_status(error, condition, status):
    made = as_amqp(error)
    assert (made.condition, made.description) == (condition, "x")
    assert status_of(made.condition) == status


def test_other_statuses():
    assert status_of(MESSAGE_LOCK_LOST) == 410
    assert status_of("com.microsoft:argument-error") == 400
