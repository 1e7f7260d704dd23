"""Requests, responses, and the links that responses take."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from aztask.emulator.amqp import AmqpError, encode, sections
from aztask.emulator.amqp.link import Inbound
from aztask.emulator.amqp.sections import cut, value_body
from aztask.emulator.broker import nodes
from aztask.emulator.broker.nodes import (
    CBS_NAMES,
    MANAGEMENT_NAMES,
    Replies,
    Responder,
    failure,
    request_of,
    response,
)


def parsed(message_id=None, reply_to="answers", **properties):
    fields = [message_id or encode.NULL, *[encode.NULL] * 3, encode.string(reply_to)]
    pairs = [(encode.string(name), encode.string(text)) for name, text in properties.items()]
    payload = (
        encode.fields(sections.PROPERTIES, fields)
        + encode.described(sections.APPLICATION_PROPERTIES, encode.map_of(pairs))
        + encode.described(sections.AMQP_VALUE, encode.string("body"))
    )
    return request_of(Inbound(0, 0, False, payload))


def test_the_parts_of_a_request():
    request = parsed(encode.ulong(7), operation="do", name="n")
    assert (request.operation, request.body, request.reply_to) == ("do", "body", "answers")
    assert (request.parameter("name"), request.parameter("x")) == ("n", None)


@pytest.mark.parametrize("message_id", [encode.ulong(7), encode.string("id"), encode.binary(b"b")])
def test_a_response_repeats_the_requests_id_byte_for_byte(message_id):
    raw = response(parsed(message_id), MANAGEMENT_NAMES, 200, "OK", body=encode.string("result"))
    found = cut(raw)
    assert message_id in raw
    assert found.property(sections.CORRELATION_ID) is not None
    assert found.application_properties == {"statusCode": 200, "statusDescription": "OK"}
    assert value_body(found) == "result"


def test_a_failure_names_status_and_condition_and_keeps_the_tracking_id():
    request = parsed(**{"com.microsoft:tracking-id": "t"})
    found = cut(failure(request, CBS_NAMES, AmqpError("amqp:not-found", "no such queue")))
    assert found.application_properties == {
        "status-code": 404,
        "status-description": "no such queue",
        "error-condition": "amqp:not-found",
        "com.microsoft:tracking-id": "t",
    }


class ResponseLink:
    """A sending link with some credit, which records what is sent."""

    def __init__(self, session, address="", credit=9):
        self.session, self.credit, self.attached, self.draining = session, credit, True, False
        self.target = SimpleNamespace(address=address)
        self.sent, self.error = [], None

    def send(self, payload, _tag):
        self.credit -= 1
        self.sent.append(payload)

    def detach(self, error):
        self.error = error


@pytest.mark.parametrize(
    ("links", "chosen"),
    [
        ([("here", "answers", "n"), ("here", "other", "n")], 0),
        ([("far", "other", "n"), ("here", "other", "n"), ("far", "other", "n")], 1),
        ([("far", "other", "n"), ("far", "other", "n")], 1),
        ([("far", "answers", "n"), ("here", "other", "n")], 0),
        ([("here", "answers", "another node")], None),
        ([], None),
    ],
)
def test_the_link_of_a_response(links, chosen):
    made = [ResponseLink(session, address) for session, address, _ in links]
    nodes = [node for *_, node in links]
    responders = [Responder(link, node) for link, node in zip(made, nodes, strict=True)]
    Replies(SimpleNamespace(session="here"), "n", responders).send(parsed(), b"response")
    assert [link.sent for link in made] == [
        [b"response"] if number == chosen else [] for number in range(len(made))
    ]


def test_responses_wait_for_credit_up_to_a_limit(monkeypatch):
    monkeypatch.setattr(nodes, "MAX_WAITING", 2)
    link = ResponseLink("here", credit=0)
    responder = Responder(link, "n")
    responder.send(b"1")
    responder.send(b"2")
    assert link.sent == []
    link.credit = 1
    responder.credited()
    assert link.sent == [b"1"]
    responder.send(b"3")
    responder.send(b"4")
    assert link.error.condition == "amqp:resource-limit-exceeded"
