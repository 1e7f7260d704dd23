"""Signatures of version 2: what they cover, which age they may have, how version 1 ends."""

import base64
import dataclasses
import hashlib
import hmac
import json
from pathlib import Path

import msgpack
import pytest
from azure.servicebus import ServiceBusReceivedMessage
from azure.servicebus._pyamqp._encode import encode_payload
from azure.servicebus._transport._pyamqp_transport import PyamqpTransport

from aztask.celery.transport.routing import to_message
from aztask.errors import ContentRefused, DecodeError
from aztask.message.bounds import MessageLimits
from aztask.message.codec import Codec
from aztask.message.message import TaskMessage
from aztask.message.signatures import ANNOUNCED, NOT_SIGNED, SignatureRules
from aztask.queues.local.payload import envelope_of as local_envelope
from aztask.queues.local.payload import payload_of
from aztask.queues.servicebus.reading import read_message
from aztask.queues.servicebus.wire import envelope_of as bus_envelope
from aztask.queues.servicebus.wire import message_of
from aztask.queues.storagequeue.wire import read_text, text_of

NOW = 1_800_000_000.0
KEY = b"k" * 32
MESSAGE = TaskMessage(
    id="t1",
    task="shop.pay",
    queue="pay",
    body=b"\x93\x90\x80\x80",
    root_id="t1",
    parent_id="t0",
    group="g",
    eta=NOW + 5,
    expires=NOW + 900,
    time_limit=30.0,
    argsrepr="()",
    correlation_id="c",
    reply_to="answers",
    session="s",
    ordered=False,
    resubmit_count=1,
    snooze_count=2,
    hop=3,
    generation=1,
    delivery_base=4,
    unknown_since=NOW - 3,
    saved=b"s",
    pointer=7,
    lease_seconds=60.0,
    extra={"tenant": "ann", "map": {"b": [1, 2.5, None], "a": b"x"}},
)


def codec(now=NOW, *, keys=(KEY,), max_age=0.0, skew=300.0, old=True):
    rules = SignatureRules(old, lambda queue: max_age, skew, lambda: now)
    return Codec(signing_keys=keys, signatures=rules)


@pytest.mark.parametrize("old", [True, False])
def test_every_header_is_covered(old):
    """Changing, removing or adding a header is refused, with version 1 accepted and without."""
    signing = codec(old=old)
    envelope = signing.to_envelope(MESSAGE)
    assert signing.from_envelope(envelope, "pay") == MESSAGE
    names = [name for name in envelope.headers if name not in NOT_SIGNED]
    assert {"expires", "eta", "timelimit", "aztask-pointer", "aztask-ordered", "tenant"} <= {*names}
    for name in names:
        for value in (0, 1, "other", None, b"bytes", [1, 1], 1.5, True):
            if type(value) is type(envelope.headers[name]) and value == envelope.headers[name]:
                continue
            forged = dataclasses.replace(envelope, headers={**envelope.headers, name: value})
            with pytest.raises(ContentRefused, match="does not match"):
                signing.from_envelope(forged, "pay")
        left = {key: value for key, value in envelope.headers.items() if key != name}
        with pytest.raises(ContentRefused, match="does not match"):
            signing.from_envelope(dataclasses.replace(envelope, headers=left), "pay")
    for name in ("aztask-lease", "priority", "compression", "new"):
        forged = dataclasses.replace(envelope, headers={**envelope.headers, name: "x"})
        with pytest.raises(ContentRefused, match="does not match"):
            signing.from_envelope(forged, "pay")


@pytest.mark.parametrize("name", ["traceparent", "tracestate", "baggage", "Diagnostic-Id"])
def test_the_headers_of_tracing_are_not_covered(name):
    signing = codec(old=False)
    envelope = signing.to_envelope(MESSAGE)
    forged = dataclasses.replace(envelope, headers={**envelope.headers, name: "user=root"})
    assert name in NOT_SIGNED
    assert signing.from_envelope(forged, "pay").id == MESSAGE.id


@pytest.mark.parametrize(
    "changed",
    [
        {"session": "other"},
        {"session": None},
        {"correlation_id": "other"},
        {"properties": {}},
        {"properties": {"reply_to": "other"}},
        {"properties": {"reply_to": "answers", "body_encoding": "base64"}},
    ],
    ids=repr,
)
def test_the_properties_that_a_task_reads_are_covered(changed):
    forged = dataclasses.replace(codec().to_envelope(MESSAGE), **changed)
    with pytest.raises(ContentRefused, match="does not match"):
        codec().from_envelope(forged, "pay")


def test_what_tracing_adds_on_the_way_is_ignored():
    envelope = codec().to_envelope(MESSAGE)
    traced = {"traceparent": "00-1-2-01", "tracestate": "a=b", "Diagnostic-Id": "x", "baggage": "y"}
    changed = dataclasses.replace(envelope, headers={**traced, **envelope.headers})
    assert codec().from_envelope(changed, "pay").traceparent == "00-1-2-01"


def test_the_order_of_headers_does_not_matter():
    envelope = codec().to_envelope(MESSAGE)
    headers = dict(reversed(envelope.headers.items()))
    headers["map"] = dict(reversed(headers["map"].items()))
    changed = dataclasses.replace(envelope, headers=headers)
    assert codec().from_envelope(changed, "pay") == MESSAGE


def test_others_can_compute_version_2():
    """As docs/wire.md says it."""
    message = TaskMessage(id="t", task="a.b", queue="q", body=b"\x93\x90\x80\x80")
    envelope = codec(old=False).to_envelope(message, delay=2.5)
    times = [1_800_000_000_000_000, 1_800_000_002_500_000]
    headers = {name: envelope.headers[name] for name in sorted(envelope.headers)}
    given = headers.pop("aztask-signature-2")
    properties = ["application/x-msgpack", "binary", "t", None, None, None]
    covered = msgpack.packb([*times, "q", *properties, headers])
    framed = b"aztask:2" + b"".join(
        len(part).to_bytes(8, "big") + part for part in (covered, message.body)
    )
    digest = hmac.new(KEY, framed, hashlib.sha256).hexdigest()
    assert given == f"2:{times[0]}:{times[1]}:hmac-sha256:{digest}"


# -- age -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("received", "fits"),
    [(0, True), (60 + 29.9, True), (60 + 30.1, False), (-29.9, True), (-30.1, False)],
)
def test_a_signature_has_a_highest_age(received, fits):
    envelope = codec(NOW).to_envelope(MESSAGE)
    reader = codec(NOW + received, max_age=60.0, skew=30.0)
    assert codec(NOW + received).from_envelope(envelope, "pay") == MESSAGE  # without a limit
    assert reader.from_envelope(envelope, "pay", any_age=True) == MESSAGE
    if fits:
        assert reader.from_envelope(envelope, "pay") == MESSAGE
        return
    with pytest.raises(ContentRefused, match=r"signature_max_age|signature_clock_skew"):
        reader.from_envelope(envelope, "pay")


def test_the_age_of_a_delayed_message_starts_when_it_is_due():
    envelope = codec(NOW).to_envelope(MESSAGE, delay=86400.0)
    assert codec(NOW + 86430, max_age=60.0, skew=0.0).from_envelope(envelope, "pay") == MESSAGE
    with pytest.raises(ContentRefused, match="is 100 s old"):
        codec(NOW + 86500, max_age=60.0, skew=0.0).from_envelope(envelope, "pay")


@pytest.mark.parametrize("field", [1, 2])
def test_the_times_are_covered(field):
    envelope = codec(NOW).to_envelope(MESSAGE)
    parts = envelope.headers["aztask-signature-2"].split(":")
    parts[field] = str(int(parts[field]) + 1)
    headers = {**envelope.headers, "aztask-signature-2": ":".join(parts)}
    with pytest.raises(ContentRefused, match="does not match"):
        codec(NOW).from_envelope(dataclasses.replace(envelope, headers=headers), "pay")


# -- version 1 -----------------------------------------------------------------------------------

FIXTURES = json.loads((Path(__file__).parent / "fixtures" / "aztask-0.1.json").read_text())
OLD_KEY = FIXTURES["key"].encode()


def received(kind, broker):
    """The envelope in the bytes that aztask 0.1 sent."""
    wire = FIXTURES[kind][broker]
    if broker == "storage":
        return read_text(wire).envelope
    data = base64.b64decode(wire)
    if broker == "local":
        return local_envelope(data)
    return bus_envelope(ServiceBusReceivedMessage(read_message(data), receiver=None))


@pytest.mark.parametrize("broker", ["storage", "local", "service_bus"])
def test_messages_of_the_old_release_are_read(broker):
    signed, plain = received("signed", broker), received("plain", broker)
    assert "aztask-signature" in signed.headers
    message = codec(keys=[OLD_KEY]).from_envelope(signed, "bulk")
    assert (message.id, message.hop, message.saved) == ("7d4f", 2, b"\x81\xa4page\x07")
    assert message.expires == 1_900_000_000.5
    assert Codec().decode_arguments(message) == (("a.png",), {"width": 200})
    assert Codec().from_envelope(plain, "bulk") == message
    with pytest.raises(ContentRefused, match="only a signature of version 1, which is not acc"):
        codec(keys=[OLD_KEY], old=False).from_envelope(signed, "bulk")


def old_release_accepts(envelope, queue, key):
    """The check of aztask 0.1, written again as its documentation describes it."""
    headers = envelope.headers
    parts = [
        envelope.body,
        *(str(headers[name]).encode() for name in ("task", "id")),
        queue.encode(),
        *(str(headers[name]).encode() for name in ("aztask-generation", "aztask-hop")),
        envelope.content_type.encode(),
        envelope.content_encoding.encode(),
        headers.get("aztask-saved", b""),
    ]
    framed = b"aztask:1" + b"".join(len(part).to_bytes(8, "big") + part for part in parts)
    digest = hmac.new(key, framed, hashlib.sha256).hexdigest()
    known = {"application/x-msgpack", "application/json"}
    content_type = envelope.content_type.partition(";")[0].strip().lower()
    return headers.get("aztask-signature") == f"hmac-sha256:{digest}" and content_type in known


def test_the_old_release_reads_messages_of_this_one_until_it_is_switched_off():
    assert old_release_accepts(received("signed", "local"), "bulk", OLD_KEY)
    assert old_release_accepts(codec().to_envelope(MESSAGE), "pay", KEY)
    assert not old_release_accepts(codec(old=False).to_envelope(MESSAGE), "pay", KEY)
    for writes in (True, False):
        for reads in (True, False):
            envelope = codec(old=writes).to_envelope(MESSAGE)
            assert codec(old=reads).from_envelope(envelope, "pay") == MESSAGE


def test_the_clone_of_an_old_worker_is_accepted():
    """It carries the version 2 of the original on, as a header that it does not know."""
    original = codec().to_envelope(MESSAGE)
    clone = dataclasses.replace(MESSAGE, hop=4, resubmit_count=2, extra={})
    signed = codec().to_envelope(clone)
    bare = dataclasses.replace(signed, content_type="application/x-msgpack")
    stale = {**bare.headers, "aztask-signature-2": original.headers["aztask-signature-2"]}
    parts = [b"\x93\x90\x80\x80", b"shop.pay", b"t1", b"pay", b"1", b"4"]
    parts += [b"application/x-msgpack", b"binary", b"s"]
    framed = b"aztask:1" + b"".join(len(part).to_bytes(8, "big") + part for part in parts)
    stale["aztask-signature"] = "hmac-sha256:" + hmac.new(KEY, framed, "sha256").hexdigest()
    from_old = dataclasses.replace(bare, headers=stale)
    assert codec().from_envelope(from_old, "pay") == clone
    assert "aztask-signature-2" not in codec().from_envelope(from_old, "pay").extra


@pytest.mark.parametrize("content_type", ["application/x-msgpack", "application/x-msgpack; a=b"])
def test_nobody_can_turn_version_2_into_version_1(content_type):
    envelope = codec().to_envelope(MESSAGE)
    assert envelope.content_type.endswith(ANNOUNCED)
    headers = {k: v for k, v in envelope.headers.items() if k != "aztask-signature-2"}
    headers["expires"] = "2099-01-01T00:00:00+00:00"
    stripped = dataclasses.replace(envelope, headers=headers)
    with pytest.raises(ContentRefused):
        codec().from_envelope(stripped, "pay")
    with pytest.raises(ContentRefused, match="does not match"):
        codec().from_envelope(dataclasses.replace(stripped, content_type=content_type), "pay")


def test_a_celery_consumer_sees_the_plain_content_type():
    fields = to_message(codec().to_envelope(MESSAGE), MessageLimits())
    assert fields["content_type"] == "application/x-msgpack"


# -- limits first --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "headers",
    [
        {f"h{n}": n for n in range(1000)},
        {"big": "x" * 40_000},
        {"list": list(range(1000))},
        {"deep": [[[[[[[[[[1]]]]]]]]]]},
        {"aztask-saved": b"x" * 2000},
        {"aztask-saved": [[[[[[[[[[1]]]]]]]]]]},
        {"aztask-saved": {"a": 1, 2: 3}},
        {3: 4},
    ],
    ids=["many", "big", "list", "deep", "saved", "deep saved", "mixed saved", "number"],
)
def test_limits_hold_before_a_signature_is_computed(headers, monkeypatch):
    small = Codec(signing_keys=[KEY], limits=MessageLimits(body_bytes=1000))
    envelope = small.to_envelope(dataclasses.replace(MESSAGE, extra={}))
    monkeypatch.setattr(hmac, "digest", lambda *_: pytest.fail("computed"))
    with pytest.raises(DecodeError):
        small.from_envelope(
            dataclasses.replace(envelope, headers={**envelope.headers, **headers}), "pay"
        )
    with pytest.raises(ContentRefused, match="the body has 1001 bytes"):
        small.from_envelope(dataclasses.replace(envelope, body=bytes(1001)), "pay")


# -- on the wire of each broker ------------------------------------------------------------------


def test_a_signature_survives_each_broker():
    plain = dataclasses.replace(MESSAGE, session=None)
    envelope = codec().to_envelope(plain)
    assert codec().from_envelope(local_envelope(payload_of(envelope)), "pay") == plain
    assert codec().from_envelope(read_text(text_of(envelope)).envelope, "pay") == plain
    inside = codec().to_envelope(MESSAGE)
    amqp = PyamqpTransport.to_outgoing_amqp_message(message_of(inside, NOW).raw_amqp_message)
    message = read_message(encode_payload(bytearray(), amqp))
    arrived = bus_envelope(ServiceBusReceivedMessage(message, receiver=None))
    assert codec().from_envelope(arrived, "pay") == MESSAGE
