"""`aztask move` names everything that a store keeps: what the code has, found in it, has a way."""

from __future__ import annotations

from storeplaces import KINDS, TABLES, kinds

from aztask.operate.move.kinds import COUNTED, ROWS, STAY, WITH
from aztask.queues.base import MessageState, QueueStats


def test_each_kind_of_row_and_each_table_has_a_way_to_move() -> None:
    """A new kind fails here, too: say how it moves, and try it."""
    found = kinds()
    assert {*found, *KINDS, *TABLES} == {*ROWS, *WITH, *STAY}
    assert set(WITH.values()) <= set(ROWS)
    assert {name: found[name] for name in COUNTED} == dict(COUNTED)
    assert set(ROWS) - set(COUNTED) == {"runs", "workflow_documents", "schedules"}


def test_each_state_of_a_message_is_known() -> None:
    """Waiting and leased ones are received, scheduled ones peeked, deferred ones called for."""
    assert {each.value for each in MessageState} == {"active", "leased", "scheduled", "deferred"}
    named = set(QueueStats.__dataclass_fields__)
    assert named == {"queue", "active", "leased", "scheduled", "deferred", "dead", "total"}
