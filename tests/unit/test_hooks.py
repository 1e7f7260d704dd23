"""An app's hooks, and events that go to files and to listeners."""

import pytest

from aztask import App
from aztask.errors import EncodeError
from aztask.hooks import HookedSink, Listeners, Sending, WorkerInfo
from aztask.stores.events.event import Event
from aztask.stores.events.sink import NullEventSink
from aztask.stores.records.base import NOTE_BYTES

EVENT = Event("received", "id", "shop.add", "default")


class Recorder(NullEventSink):
    """Keeps what it is given."""

    idle = False

    def __init__(self):
        self.calls = []

    def emit(self, event):
        self.calls.append(event)

    def flush(self):
        self.calls.append("flush")

    def close(self):
        self.calls.append("close")


def test_an_event_goes_to_the_sink_and_to_the_listeners():
    inner, listeners, heard = Recorder(), Listeners("on_event"), []
    listeners(heard.append)
    sink = HookedSink(inner, listeners)
    sink.emit(EVENT)
    sink.flush()
    sink.close()
    assert inner.calls == [EVENT, "flush", "close"]
    assert heard == [EVENT]


def test_it_is_idle_only_if_no_one_takes_events():
    listeners = Listeners("on_event")
    assert HookedSink(NullEventSink(), listeners).idle
    assert not HookedSink(Recorder(), listeners).idle
    listeners(print)
    assert not HookedSink(NullEventSink(), listeners).idle


def test_each_send_has_headers_of_its_own():
    first, second = Sending("shop.add", "default", ["a"]), Sending("shop.add", "default", ["b"])
    first.headers["traceparent"] = "00-1"
    assert second.headers == {}
    assert WorkerInfo("w").queues == ()


def test_a_note_stays_with_the_task_until_it_is_purged(tmp_path):
    address = f"local://{tmp_path}/queues.db"
    app = App("shop", broker=address, results=address)
    notes = {"a": b"for the reader", "b": b"x" * (NOTE_BYTES + 1)}

    @app.around_send
    def keep(sending):
        sending.note = notes.get(sending.ids[0])
        yield

    app.send("shop.add", [1], task_id="a")
    app.send("shop.add", [1], task_id="a", force=True)
    first, second = app.results.history("a")
    assert (first.note, second.note) == (notes["a"], notes["a"])
    with pytest.raises(EncodeError, match="at most 61440 bytes, not 61441"):
        app.send("shop.add", [1], task_id="b")
    assert app.results.get("b") is None
    assert app.broker.stats("default").active == 2
    app.close()
