"""An app's hooks, and events that go to files and to listeners."""

from aztask.events.event import Event
from aztask.events.sink import NullEventSink
from aztask.hooks import HookedSink, Sending, WorkerInfo
from aztask.support.hooks import Listeners

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
