"""Messages over HTTP: what is sent one way is what is received the other, and what is refused."""

from __future__ import annotations

import json
import re
import string
from datetime import UTC, datetime
from email.utils import format_datetime

import pytest
from hypothesis import given
from hypothesis import strategies as st

from aztask.emulator.admin.brokerproperties import BATCH_TYPE, messages_of, received
from aztask.emulator.amqp import AmqpError, encode, sections
from aztask.emulator.amqp.encode import Described, Int32, Symbol, Timestamp
from aztask.emulator.broker import stored
from aztask.emulator.broker.entities import Entity
from aztask.emulator.broker.filters import TIMESPAN
from aztask.emulator.broker.producer import new_message
from aztask.emulator.config import MAX_DURATION

NOW = 1_800_000_000.0
TEXTS = st.text(st.characters(exclude_categories=("Cs",)), max_size=60)
NAMES = st.text(string.ascii_letters + string.digits + "-_.", min_size=1, max_size=20).map(
    lambda name: f"x{name}"
)
MOMENTS = st.datetimes(datetime(1000, 1, 1), datetime(9999, 1, 1), timezones=st.just(UTC)).map(
    lambda moment: moment.replace(microsecond=0)
)


def request(body=b"body", **headers):
    """The messages of a request, whose text is in the encoding of a head."""
    fields = [
        (name.replace("__", "-"), value.encode().decode("latin-1"))
        for name, value in headers.items()
    ]
    return messages_of(fields, {name.lower(): value for name, value in fields}, body)


def stored_as(raw, **settings):
    entity = Entity("q", max_message_bytes=2**20, **settings)
    return new_message(entity, raw, NOW)


def amqp(raw, **more):
    """The message as a receiver over AMQP gets it."""
    return sections.cut(delivered(raw, **more))


def delivered(raw, **more):
    return stored.deliver(
        stored_as(raw).payload, sequence=7, enqueued_ms=int(NOW * 1000), delivery_count=0, **more
    )


def http(raw, **more):
    """Body, content type, broker properties and properties, as a receiver over HTTP gets them."""
    body, content_type, headers = received(delivered(raw, **more), "")
    return body, content_type, json.loads(headers.pop("BrokerProperties")), headers


def quoted(text):
    """As Microsoft's SDK writes text."""
    return '"' + text.replace('"', '\\"') + '"'


def in_header(text):
    """Whether text can be the value of a header."""
    return text == re.sub(r"[\x00-\x1f\x7f]", "", text) and text == text.strip()


# -- what HTTP sends is what AMQP receives ---------------------------------------------------------


@given(TEXTS.filter(in_header))
def test_text_arrives_as_text(text):
    (raw,) = request(given=quoted(text))
    assert amqp(raw).application_properties == {"given": text}
    assert http(raw)[3] == {"given": quoted(text)}


@given(st.integers(-(2**63), 2**63 - 1))
def test_whole_numbers_arrive_as_int_or_long(number):
    (raw,) = request(given=str(number))
    value = amqp(raw).application_properties["given"]
    assert value == number
    assert isinstance(value, Int32) is (-(2**31) <= number < 2**31)
    assert http(raw)[3] == {"given": str(number)}


@given(st.floats(allow_nan=False, allow_infinity=False))
def test_other_numbers_arrive_as_double(number):
    (raw,) = request(given=str(number))
    value = amqp(raw).application_properties["given"]
    assert (type(value), value) == (float, number)
    assert http(raw)[3] == {"given": str(number)}


@given(MOMENTS)
def test_dates_arrive_as_timestamps(moment):
    text = f'"{format_datetime(moment, usegmt=True)}"'
    (raw,) = request(given=text)
    value = amqp(raw).application_properties["given"]
    assert (type(value), value) == (Timestamp, round(moment.timestamp()) * 1000)
    assert http(raw)[3] == {"given": text}


@pytest.mark.parametrize(
    ("sent", "value", "shown"),
    [
        ("true", True, "true"),
        ("False", False, "false"),
        ("High", "High", '"High"'),  # the example of Microsoft's page
        ("12345,ABC", "12345,ABC", '"12345,ABC"'),
        ("007", "007", '"007"'),
        ("1e999", "1e999", '"1e999"'),
        ("nan", "nan", '"nan"'),
        ('"', '"', '"\\""'),
        ("", "", '""'),
        ('"42"', "42", '"42"'),
        ("9223372036854775808", 9223372036854775808.0, "9.223372036854776e+18"),
        ('"Sun, 06 Nov 1994 08:49:37 +0000"', "Sun, 06 Nov 1994 08:49:37 +0000", None),
        ('"Mon, 06 Nov 1994 08:49:37 GMT"', "Mon, 06 Nov 1994 08:49:37 GMT", None),  # a Sunday
    ],
)
def test_other_values(sent, value, shown):
    (raw,) = request(given=sent)
    got = amqp(raw).application_properties["given"]
    assert (got, isinstance(got, bool)) == (value, isinstance(value, bool))
    assert http(raw)[3] == {"given": shown or sent}


@given(st.dictionaries(NAMES, TEXTS.filter(in_header), max_size=5))
def test_names_are_kept_as_they_are(properties):
    fields = [(name, quoted(value)) for name, value in properties.items()]
    encoded = [(name, value.encode().decode("latin-1")) for name, value in fields]
    (raw,) = messages_of(encoded, {}, b"")
    assert amqp(raw).application_properties == properties
    assert http(raw)[3] == dict(fields)


def test_headers_of_http_are_no_properties():
    (raw,) = request(
        Host="h",
        User__Agent="u",
        Authorization="secret",
        Priority="1",
        X__Ms__Retrypolicy="NoRetry",
    )
    assert amqp(raw).application_properties == {"Priority": 1}
    (raw,) = messages_of([("Customer", "1"), ("Customer", "ABC")], {}, b"")
    assert amqp(raw).application_properties == {"Customer": "1,ABC"}


BROKER = {
    "CorrelationId": sections.CORRELATION_ID,
    "Label": sections.SUBJECT,
    "MessageId": sections.MESSAGE_ID,
    "ReplyTo": sections.REPLY_TO,
    "ReplyToSessionId": sections.REPLY_TO_GROUP,
    "SessionId": sections.GROUP_ID,
    "To": sections.TO,
}


@given(st.fixed_dictionaries({}, optional={name: TEXTS for name in BROKER if name != "MessageId"}))
def test_broker_properties_arrive_as_properties(given_properties):
    properties = {"MessageId": "m", **given_properties}
    for ascii_only in (True, False):
        header = json.dumps(properties, ensure_ascii=ascii_only)
        (raw,) = request(BrokerProperties=header)
        message = amqp(raw)
        assert {name: message.property(BROKER[name]) for name in properties} == properties
        shown = http(raw)[2]
        assert {name: shown[name] for name in properties} == properties


@given(st.binary(max_size=300))
def test_the_body_is_one_data_section(body):
    (raw,) = request(body, Content__Type="image/png")
    message = amqp(raw)
    assert [message.raw[a:b] for a, b in message.data_items] == [body]
    assert message.property(sections.CONTENT_TYPE) == "image/png"
    assert http(raw)[:2] == (body, "image/png")


def test_times_keys_and_what_is_unknown():
    broker = {
        "TimeToLive": 90,
        "ScheduledEnqueueTimeUtc": "Fri, 15 Jan 2027 08:01:00 GMT",
        "PartitionKey": "p",
        "ViaPartitionKey": "v",
        "State": "Active",
        "Invented": {"x": []},
        "To": None,
    }
    (raw,) = request(BrokerProperties=json.dumps(broker))
    message = amqp(raw)
    assert message.header[2] == 90_000
    assert message.annotations["x-opt-partition-key"] == "p"
    assert message.annotations["x-opt-via-partition-key"] == "v"
    assert message.annotations["x-opt-scheduled-enqueue-time"] == (NOW + 60) * 1000
    assert stored_as(raw).due == NOW + 60
    shown = http(raw)[2]
    assert {name: shown.get(name) for name in broker} == {**broker, "Invented": None}
    assert http(request()[0])[2]["TimeToLive"] > MAX_DURATION


@pytest.mark.parametrize(
    ("broker", "milliseconds"),
    [
        ({"TimeToLive": "0.5"}, 500),
        ({"TimeToLive": 1e12}, None),
        ({"TimeToLiveTimeSpan": "0.00:00:40"}, 40_000),
        ({"TimeToLiveTimeSpan": "1.02:03:04.5"}, 93_784_500),
        ({"TimeToLiveTimeSpan": "00:01:00"}, 60_000),
    ],
)
def test_every_form_of_a_time_to_live(broker, milliseconds):
    (raw,) = request(BrokerProperties=json.dumps(broker))
    assert amqp(raw).header[2] == milliseconds


# -- what AMQP sends is what HTTP receives ---------------------------------------------------------


@given(
    st.dictionaries(
        NAMES,
        st.one_of(
            TEXTS.filter(in_header),
            st.booleans(),
            st.integers(-(2**63), 2**63 - 1),
            st.floats(allow_nan=False, allow_infinity=False),
            MOMENTS.map(lambda moment: Timestamp(round(moment.timestamp()) * 1000)),
        ),
        max_size=6,
    )
)
def test_properties_of_amqp_come_back_over_http(properties):
    """The headers that one program receives are headers that another can send."""
    pairs = [(encode.string(name), encode.simple(value)) for name, value in properties.items()]
    raw = encode.described(sections.APPLICATION_PROPERTIES, encode.map_of(pairs))
    headers = http(raw)[3]
    fields = [(name, value.encode().decode("latin-1")) for name, value in headers.items()]
    (again,) = messages_of(fields, {}, b"")
    got = amqp(again).application_properties
    # a text that is a date of HTTP cannot be told from a date
    assert got == properties
    assert {n: isinstance(v, (bool, Timestamp)) for n, v in got.items()} == {
        n: isinstance(v, (bool, Timestamp)) for n, v in properties.items()
    }


def test_no_property_can_forge_a_header():
    pairs = {
        "Content-Length": 5,
        "Location": "http://elsewhere",
        "a b": 1,
        "a:\r\nSet-Cookie": 1,
        "": 1,
        "text": "a\r\nSet-Cookie: b\0",
    }
    named = [(encode.string(name), encode.simple(value)) for name, value in pairs.items()]
    raw = encode.described(sections.APPLICATION_PROPERTIES, encode.map_of(named))
    assert http(raw)[3] == {"text": '"a  Set-Cookie: b "'}
    fields = [encode.NULL] * 6 + [encode.string("a\r\nb: c")]
    assert http(encode.fields(sections.PROPERTIES, fields))[1] == "a  b: c"


@pytest.mark.parametrize(
    ("value", "shown"),
    [
        (Described(TIMESPAN, 15 * 10_000_000), '"00:00:15"'),
        (Described(TIMESPAN, -(86400 + 3661) * 10_000_000 - 5), '"-1.01:01:01.0000005"'),
        (Described(Symbol("com.microsoft:uri"), "http://x/"), '"http://x/"'),
        (Symbol("s"), '"s"'),
        (b"\x01\xff", '"01ff"'),
        (Timestamp(2**62), f'"{2**62}"'),
    ],
)
def test_other_types_of_amqp(value, shown):
    pairs = [(encode.string("given"), encode.simple(value))]
    raw = encode.described(sections.APPLICATION_PROPERTIES, encode.map_of(pairs))
    assert http(raw)[3] == {"given": shown}


@pytest.mark.parametrize(
    ("value", "body"),
    [
        (encode.string("é"), "é".encode()),
        (encode.binary(b"\xff"), b"\xff"),
        (encode.NULL, b""),
        (encode.list_of([encode.long(1), encode.string("a")]), b'[1, "a"]'),
    ],
)
def test_other_bodies_of_amqp(value, body):
    assert http(encode.described(sections.AMQP_VALUE, value))[0] == body
    two = encode.described(sections.DATA, encode.binary(b"a"))
    assert http(two + two)[0] == b"aa"


def test_the_broker_properties_of_a_locked_message():
    (raw,) = request(BrokerProperties='{"MessageId": "m"}')
    locked = delivered(raw, lock_token=bytes(16), locked_until_ms=int(NOW * 1000) + 30_000)
    headers = received(locked, "00000000-0000-0000-0000-000000000000")[2]
    shown = json.loads(headers["BrokerProperties"])
    assert shown.pop("TimeToLive") == pytest.approx(922_337_203_685.47754)
    assert shown == {  # as in the service's recordings
        "DeliveryCount": 1,
        "EnqueuedSequenceNumber": 0,
        "EnqueuedTimeUtc": "Fri, 15 Jan 2027 08:00:00 GMT",
        "LockToken": "00000000-0000-0000-0000-000000000000",
        "LockedUntilUtc": "Fri, 15 Jan 2027 08:00:30 GMT",
        "MessageId": "m",
        "SequenceNumber": 7,
        "State": "Active",
    }


# -- batches ---------------------------------------------------------------------------------------


def batch(document):
    body = document if isinstance(document, bytes) else json.dumps(document).encode()
    return request(body, Content__Type=f"{BATCH_TYPE}; charset=utf-8", ignored="1")


def test_a_batch_has_the_properties_of_each_message():
    first, second = batch(
        [
            {"Body": "é", "BrokerProperties": {"Label": "M1", "TimeToLiveTimeSpan": "0.00:00:40"}},
            {
                "Body": "",
                "UserProperties": {"text": '"1"', "int": 1, "long": 2**40, "no": None, "yes": True},
            },
        ]
    )
    assert (amqp(first).property(sections.SUBJECT), amqp(first).header[2]) == ("M1", 40_000)
    assert http(first)[0] == "é".encode()
    assert http(first)[1] == "application/xml; charset=utf-8"  # as the service
    properties = amqp(second).application_properties
    assert properties == {"text": '"1"', "int": 1, "long": 2**40, "no": None, "yes": True}
    assert isinstance(properties["int"], Int32)
    assert not isinstance(properties["long"], Int32)


@pytest.mark.parametrize(
    ("document", "text"),
    [
        (b"", "the batch must be JSON"),
        (b"\xff", "the batch must be JSON"),
        (b"[" * 100_000, "the batch must be JSON"),
        (b"[1" + b"0" * 5000 + b"]", "the batch must be JSON"),
        ({}, "a JSON array of 1 to"),
        ([], "a JSON array of 1 to"),
        ([{}] * 4501, "a JSON array of 1 to"),
        ([{"Body": "a"}, {}], "message 1 of the batch"),
        ([{"Body": {}}], "message 0 of the batch"),
        ([{"Body": "a", "UserProperties": []}], None),
        ([{"Body": "a", "UserProperties": [1]}], "UserProperties must be a JSON object"),
        ([{"Body": "a", "BrokerProperties": "x"}], "BrokerProperties must be a JSON object"),
        ([{"Body": "a", "UserProperties": {"x": []}}], "x must be text, a number"),
        (b'[{"Body": "a", "UserProperties": {"x": NaN}}]', "x must be text, a number"),
    ],
)
def test_a_broken_batch_is_refused_in_one_line(document, text):
    if text is None:
        assert len(batch(document)) == 1
        return
    with pytest.raises(AmqpError) as caught:
        batch(document)
    assert text in caught.value.description
    assert "\n" not in caught.value.description


@pytest.mark.parametrize(
    ("header", "text"),
    [
        ("", "BrokerProperties must be JSON"),
        ("{'MessageId': 1}", "BrokerProperties must be JSON"),
        ("[]", "must be a JSON object"),
        ('{"MessageId": {}}', "MessageId must be text"),
        ('{"Label": true}', "Label must be text"),
        ('{"TimeToLive": -1}', "must be a number of seconds"),
        ('{"TimeToLive": "soon"}', "must be a number of seconds"),
        ('{"TimeToLive": true}', "must be a number of seconds"),
        ('{"TimeToLive": NaN}', "must be a number of seconds"),
        ('{"TimeToLive": Infinity}', "must be a number of seconds"),
        ('{"TimeToLiveTimeSpan": "40"}', "must be a span"),
        ('{"TimeToLiveTimeSpan": 40}', "must be a span"),
        ('{"ScheduledEnqueueTimeUtc": 5}', "must be a date"),
        ('{"ScheduledEnqueueTimeUtc": "tomorrow"}', "must be a date"),
        ('{"SessionId": "a", "PartitionKey": "b"}', "must be the same"),
    ],
)
def test_a_broken_header_is_refused_in_one_line(header, text):
    with pytest.raises(AmqpError) as caught:
        request(BrokerProperties=header)
    assert text in caught.value.description
    assert "\n" not in caught.value.description


@pytest.mark.parametrize(
    "text", ["2027-01-15T08:01:00Z", "2027-01-15T09:01:00+01:00", "2027-01-15 08:01:00"]
)
def test_a_schedule_may_be_iso_8601(text):
    (raw,) = request(BrokerProperties=json.dumps({"ScheduledEnqueueTimeUtc": text}))
    assert stored_as(raw).due == NOW + 60
