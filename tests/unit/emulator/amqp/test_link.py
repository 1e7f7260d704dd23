"""Links: credit, partial messages, refusals."""

from __future__ import annotations

import pytest
from amqpwire import TAG, Wire, sending


def test_an_accepted_link_repeats_the_peers_terminus():
    wire = Wire().started()
    (answer, *_rest) = wire.attach(receive=True)
    assert answer.role is False
    assert answer.source.value[0] == "q"
    assert answer.target.value[0] == "here"
    assert answer.initial_delivery_count == 0
    assert answer.max_message_size == 1000


@pytest.mark.parametrize("receive", [True, False])
def test_a_refused_link_is_attached_without_ends_then_detached(receive):
    wire = Wire().started()
    answer, detach = wire.attach(receive=receive, address="no")
    assert (answer.source, answer.target) == (None, None)
    assert detach.error.value == ["amqp:not-found", "no such thing", None]
    assert len(wire.handler.detached_) == 1


def test_messages_in_one_frame_and_in_many():
    wire = Wire().started()
    wire.attach(receive=False)
    wire.transfer(0, b"whole")
    wire.transfer(1, b"par", more=True)
    wire.transfer(1, b"t", more=True)
    wire.transfer(None, b"s", message_format=5)
    wire.transfer(2, b"lost", more=True)
    wire.transfer(2, b"", aborted=True)
    wire.transfer(3, b"settled", settled=True)
    got = [(one.delivery_id, one.payload, one.settled) for one in wire.handler.received_]
    assert got == [(0, b"whole", False), (1, b"parts", False), (3, b"settled", True)]


def test_a_message_over_the_limit_is_received_without_its_bytes():
    wire = Wire().started()
    wire.attach(receive=False)
    wire.transfer(0, bytes(900), more=True)
    wire.transfer(0, bytes(200), more=True)
    assert wire.handler.links[0].partial_size() == 0
    wire.transfer(0, bytes(1))
    wire.transfer(1, b"next")
    first, second = wire.handler.received_
    assert (first.too_large, first.payload) == (True, b"")
    assert (second.too_large, second.payload) == (False, b"next")


def test_credit_is_granted_again_when_half_is_used():
    wire = Wire().started()
    wire.attach(receive=False)
    for number in range(6):
        wire.transfer(number, b"x")
    (flow,) = wire.frames()
    assert (flow.delivery_count, flow.link_credit) == (6, 10)


def test_credit_is_absolute_against_the_delivery_count():
    wire = Wire().started()
    link = sending(wire, 5)
    link.send(b"a", TAG, "context")
    assert link.credit == 4
    wire.flow(5, count=0)
    assert link.credit == 4
    wire.flow(5, count=1)
    assert link.credit == 5
    wire.flow(0, count=3)
    assert link.credit == 2


def test_drain_uses_up_the_credit():
    wire = Wire().started()
    link = sending(wire)
    wire.flow(5, drain=True)
    assert link.draining
    wire.frames()
    link.drained()
    (flow,) = wire.frames()
    assert (flow.delivery_count, flow.link_credit, flow.drain) == (5, 0, True)


def test_settled_links_keep_nothing():
    wire = Wire().started()
    wire.attach(receive=True, settled=1)
    wire.flow(1)
    wire.handler.links[0].send(b"x", TAG, "context")
    assert wire.frames()[0].settled is True
    assert wire.handler.links[0].unsettled == {}
