"""The limits that the page on large payloads states are those of the code."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from aztask import App
from aztask.errors import AztaskError, MessageTooLarge
from aztask.message.bounds import MessageLimits
from aztask.queues.servicebus.wire import MESSAGE_LIMIT
from aztask.queues.storagequeue.wire import ENVELOPE_LIMIT

PAGE = Path(__file__).parents[3] / "docs" / "how-to" / "advanced" / "large-payloads.md"
UNITS = {"KiB": 1024, "MiB": 1024**2}
LIMITS = {
    "Storage queues": ENVELOPE_LIMIT,
    "Service Bus": MESSAGE_LIMIT,
    "`local://`": MessageLimits().body_bytes,
}
AZURITE = "UseDevelopmentStorage=true"


def stated():
    """{broker: bytes} of the table about the arguments of workflows."""
    text = PAGE.read_text().split("**Arguments of workflows**")[1].split("Pass values")[0]
    rows = re.findall(r"^ *\| (.+?) \| (\d+) (KiB|MiB) \|$", text, re.MULTILINE)
    return {broker: int(number) * UNITS[unit] for broker, number, unit in rows}


def test_the_page_states_the_limits_of_workflow_arguments():
    assert stated() == LIMITS


def test_a_workflow_with_larger_arguments_is_refused_before_anything_is_asked(tmp_path):
    """The broker is never reached: an argument that fits fails there, a larger one before."""
    app = App("limits", broker=AZURITE, results=f"local://{tmp_path}/results.db")

    @app.task
    def keep(text: str) -> None:
        """Not run here."""

    limit = stated()["Storage queues"]
    with pytest.raises(MessageTooLarge):
        (keep.si("x" * limit) | keep.si("y")).delay()
    with pytest.raises(AztaskError) as caught:
        (keep.si("x" * (limit - 2048)) | keep.si("y")).delay()
    assert not isinstance(caught.value, MessageTooLarge)
    app.close()
