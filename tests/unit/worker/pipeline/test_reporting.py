"""What the hooks for telemetry get about received deliveries."""

from __future__ import annotations

from typing import Any

from pipelinebench import Bench

from aztask.hooks import Listeners, Receiving
from aztask.message.envelope import Envelope
from aztask.worker.pipeline.work import message_of, report_received


def test_readable_messages_are_reported_and_may_get_a_trace_context(make: Any) -> None:
    bench: Bench = make()
    bench.send("a", "b")
    bench.app.broker.send("default", [Envelope(b"x", headers={"id": "z"}, message_id="damaged")])
    items = bench.receive()
    assert len(items) == 3
    heard: list[Receiving] = []
    listeners: Listeners[Receiving] = Listeners("receive")

    @listeners
    def received(receiving: Receiving) -> None:
        heard.append(receiving)
        receiving.traceparents[1] = "00-1"

    report_received(listeners, "default", items, 10.0, 11.0)
    (receiving,) = heard
    assert (receiving.queue, receiving.received) == ("default", 3)
    assert [message.id for message in receiving.messages] == ["a", "b"]
    assert receiving.deliveries == [item.delivery for item in items[:2]]
    assert (receiving.asked_at, receiving.received_at) == (10.0, 11.0)
    assert [message_of(item).traceparent for item in items[:2]] == [None, "00-1"]
