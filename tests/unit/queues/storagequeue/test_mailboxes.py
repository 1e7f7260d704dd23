"""What a mailbox's queue says in its metadata."""

import base64
import json

import pytest

from aztask.queues.base import Binding
from aztask.queues.storagequeue.mailboxes import _read


def encoded(value):
    return base64.b64encode(json.dumps(value).encode()).decode()


def test_expiry_and_bindings():
    rows = [["control", "", "fanout"], ["events", "task.#", "topic"]]
    until, bindings = _read({"expires_at": "1700000000", "bindings": encoded(rows)})
    assert until == 1_700_000_000.0
    assert bindings == [Binding("control"), Binding("events", "task.#", "topic")]


@pytest.mark.parametrize(
    "metadata",
    [
        {},
        {"expires_at": "1700000000"},
        {"expires_at": "soon", "bindings": encoded([])},
        {"expires_at": "1700000000", "bindings": "%"},
        {"expires_at": "1700000000", "bindings": encoded(5)},
        {"expires_at": "1700000000", "bindings": encoded([["too", "few"]])},
        {"expires_at": "1700000000", "bindings": base64.b64encode(b"\xff").decode()},
    ],
)
def test_what_is_damaged_has_expired(metadata):
    assert _read(metadata) == (0.0, [])
