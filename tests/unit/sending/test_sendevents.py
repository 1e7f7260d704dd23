"""The events of a program that sends, and of its forked children."""

from __future__ import annotations

import os
from types import SimpleNamespace
from typing import Any

from aztask.message.message import TaskMessage
from aztask.sending.publisher import SendEvents
from aztask.stores.events import Event


class Sinks:
    """The sinks that were opened, by writer."""

    def __init__(self, *, idle: bool = False) -> None:
        self.idle = idle
        self.opened: list[str] = []
        self.events: list[Event] = []
        self.closed = 0

    def open_events(self, writer: str) -> Any:
        self.opened.append(writer)
        return SimpleNamespace(
            idle=self.idle, emit=self.events.append, flush=lambda: None, close=self._close
        )

    def _close(self) -> None:
        self.closed += 1


def test_one_file_for_each_process(monkeypatch: Any) -> None:
    sinks = Sinks()
    events = SendEvents(sinks)
    message = TaskMessage("a", "shop.work", "default", b"", workflow="w", parent_id="p")
    events.emit("enqueued", [message, message])
    events.report(Event("occurrence_sent", "a", "shop.work", "default"))
    assert [each.event for each in sinks.events] == ["enqueued", "enqueued", "occurrence_sent"]
    assert all(each.ts > 0.0 for each in sinks.events)
    assert (sinks.events[0].workflow_id, sinks.events[0].parent_id) == ("w", "p")
    pid = os.getpid()
    monkeypatch.setattr(os, "getpid", lambda: pid + 1)
    events.emit("enqueued", [message])
    assert [each.rsplit("-", 1)[1] for each in sinks.opened] == [str(pid), str(pid + 1)]
    events.close()
    assert sinks.closed == 1
    events.report(Event("occurrence_sent", "a", "shop.work", "default"))
    assert len(sinks.opened) == 3


def test_an_idle_sink_gets_nothing() -> None:
    sinks = Sinks(idle=True)
    events = SendEvents(sinks)
    events.emit("enqueued", [TaskMessage("a", "shop.work", "default", b"")])
    events.emit("enqueued", [TaskMessage("b", "shop.work", "default", b"")])
    events.report(Event("occurrence_sent", "a", "shop.work", "default"))
    events.close()
    assert sinks.events == []
    assert len(sinks.opened) == 1
