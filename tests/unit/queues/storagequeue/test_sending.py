"""Sends: what is tried again, and what the caller is told of the rest."""

from collections import deque

import pytest
import queueservice
from queueservice import BUSY, DENIED, LOST, OK, UNSENT, Service, refused
from still import Still

from aztask.errors import BrokerUnavailable, ConfigurationError, SendUnconfirmed
from aztask.message.envelope import Envelope
from aztask.queues.storagequeue.broker import MessageSender, judge
from aztask.queues.storagequeue.delivery import QueueRequests
from aztask.queues.storagequeue.errors import Effect
from aztask.support.clock import Clock


class Bench:
    def __init__(self, monkeypatch, faults):
        self.time = Still()
        self.slept = []
        self.service = Service(self.time, faults=deque(faults))
        clock = Clock(self.time.monotonic, self.time.wall, self.slept.append)
        requests = QueueRequests("q", self.service, clock)
        self.sender = MessageSender(requests, queueservice.ThreadPool())


@pytest.fixture
def put(monkeypatch):
    """Put two messages while the service has these faults."""

    def run(*faults):
        bench = Bench(monkeypatch, faults)
        bench.failures = bench.sender.put_all([("a", 0.0), ("b", 5.0)])
        return bench

    return run


def test_all_are_stored_with_their_delays(put):
    bench = put()
    assert bench.failures == [None, None]
    assert bench.service.done == [("put", "a", 0), ("put", "b", 5)]


def test_what_did_not_happen_is_tried_again(put):
    bench = put(UNSENT, OK, BUSY, OK)
    assert bench.failures == [None, None]
    assert [text for _, text, _ in bench.service.done] == ["b", "a"]
    assert bench.slept == [0.1, 0.4]


def test_the_tries_end(put):
    bench = put(*[BUSY] * 20)
    assert [each.effect for each in bench.failures] == [Effect.NONE, Effect.NONE]
    assert bench.slept == [0.1, 0.4, 1.0]


@pytest.mark.parametrize("fault", [LOST, DENIED])
def test_what_is_in_doubt_or_refused_is_not_tried_again(put, fault):
    bench = put(OK, fault)
    assert bench.slept == []
    assert len(bench.service.asked) == 2
    assert bench.failures[0] is None and bench.failures[1] is not None


def test_a_short_pause_that_the_service_asks_for_is_kept_and_a_long_one_is_the_callers(put):
    def busy(seconds):
        error = refused(503, "ServerBusy")
        error.response.headers["Retry-After"] = str(seconds)
        return error

    assert put(busy(2), OK).slept == [2.0]
    asked = put(busy(30), OK)
    assert asked.slept == []
    assert asked.failures[0].error.retry_after == 30.0


def judged(put, *faults):
    bench = put(*faults)
    envelopes = [Envelope(b"a"), Envelope(b"b")]
    judge("q", envelopes, bench.failures)


def test_a_batch_that_was_stored_raises_nothing(put):
    judged(put)


def test_where_nothing_was_stored_the_error_says_so(put):
    with pytest.raises(ConfigurationError):
        judged(put, DENIED, DENIED)
    with pytest.raises(BrokerUnavailable):
        judged(put, *[BUSY] * 20)


@pytest.mark.parametrize("faults", [(OK, LOST), (OK, DENIED), (LOST, LOST)])
def test_otherwise_the_unconfirmed_ones_are_named(put, faults):
    with pytest.raises(SendUnconfirmed) as raised:
        judged(put, *faults)
    count = sum(fault != OK for fault in faults)
    assert f"{count} of 2 messages" in str(raised.value)
    assert [each.body for each in raised.value.unconfirmed] == [b"a", b"b"][-count:]
