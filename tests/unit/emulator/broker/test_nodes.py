"""Requests to ``$cbs`` and ``$management``."""

from __future__ import annotations

from urllib.parse import quote_plus

import pytest
from emulatorbench import Bench, message

from aztask.emulator.amqp import encode
from aztask.emulator.broker.access import Right, TokenClaim, sign
from aztask.emulator.broker.entities import EntityKind

PEEK = "com.microsoft:peek-message"
PEEK_ALL = encode.map_of(
    [
        (encode.string("from-sequence-number"), encode.long(0)),
        (encode.string("message-count"), encode.int32(5)),
    ]
)


@pytest.fixture
def secured():
    made = Bench(shared_access_key="key")
    made.create("q")
    yield made
    made.emulator.database.close()


def put_token(client, resource, key="key", **changed):
    quoted = quote_plus(resource)
    expiry = str(int(client.bench.now + 60))
    signature = quote_plus(sign(key, f"{quoted}\n{expiry}"))
    token = f"SharedAccessSignature sr={quoted}&sig={signature}&se={expiry}&skn=k"
    properties = {"name": resource, "type": "servicebus.windows.net:sastoken", **changed}
    operation = properties.pop("operation", "put-token")
    return client.request("$cbs", operation, encode.string(token), **properties)


def test_a_token_lets_a_link_attach(secured):
    client = secured.client()
    assert put_token(client, "sb://host/q")[0] == 202
    assert client.attach(receive=True)[0].source is not None


@pytest.mark.parametrize(
    ("options", "status", "condition"),
    [
        ({"resource": "sb://host/q", "key": "wrong"}, 401, "amqp:unauthorized-access"),
        ({"resource": "sb://host/missing"}, 404, "amqp:not-found"),
        ({"resource": "sb://host/q", "operation": "dance"}, 501, "amqp:not-implemented"),
    ],
)
def test_refused_tokens(secured, options, status, condition):
    assert put_token(secured.client(), **options)[:2] == (status, condition)


def test_operations_need_their_permission(secured):
    client = secured.client()
    claims = client.handler.claims
    claims.add("q", TokenClaim("q", secured.now + 60, frozenset({Right.SEND})))
    assert client.request("q/$management", PEEK, PEEK_ALL)[0] == 401
    cancel = encode.map_of([(encode.string("sequence-numbers"), encode.long_array([5]))])
    assert (
        client.request("q/$management", "com.microsoft:cancel-scheduled-message", cancel)[0] == 404
    )
    claims.add("q", TokenClaim("q", secured.now + 60, frozenset({Right.LISTEN})))
    assert client.request("q/$management", PEEK, PEEK_ALL)[0] == 204


def test_a_failed_operation_changes_nothing(bench):
    bench.create("q")
    bad = encode.map_of([(encode.string("message"), encode.binary(b"bad"))])
    good = encode.map_of([(encode.string("message"), encode.binary(message()))])
    items = encode.map_of([(encode.string("messages"), encode.list_of([good, bad]))])
    status, _, _ = bench.client().request("q/$management", "com.microsoft:schedule-message", items)
    assert status == 400
    assert sum(bench.engine.stats("q")) == 0


def test_requests_to_an_entity_that_does_not_exist(bench):
    status, condition, _ = bench.client().request("missing/$management", PEEK, PEEK_ALL)
    assert (status, condition) == (404, "amqp:not-found")


def test_rules_are_reached_through_their_subscription(bench):
    bench.create("t", kind=EntityKind.TOPIC)
    bench.create("t/Subscriptions/s", kind=EntityKind.SUBSCRIPTION)
    node = "t/Subscriptions/s/$management"
    empty = encode.map_of([])
    status, _, body = bench.client().request(node, "com.microsoft:enumerate-rules", empty)
    assert (status, len(body["rules"])) == (200, 1)


def test_a_request_that_is_no_message_detaches_its_link(bench):
    bench.create("q")
    client = bench.client()
    client.attach(receive=False, address="q/$management")
    client.transfer(0, b"garbage")
    detach = client.frames()[-1]
    assert detach.error.value[0] == "amqp:decode-error"
