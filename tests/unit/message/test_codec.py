"""The codec: what is sent comes back, and whatever comes in, only a CodecError goes out."""

import base64
import dataclasses
import datetime as dt
import hmac
import json
import pickle
import sys
import tracemalloc
import uuid
import zlib
from decimal import Decimal

import msgpack
import pytest
from hypothesis import given
from hypothesis import strategies as st
from kombu import serialization

from aztask.errors import (
    CodecError,
    ConfigurationError,
    ContentRefused,
    DecodeError,
    EncodeError,
)
from aztask.message import serializer
from aztask.message.bounds import MessageLimits
from aztask.message.codec import Codec, register_msgpack
from aztask.message.envelope import Envelope
from aztask.message.message import TaskMessage

CODEC = Codec()
JSON_CODEC = Codec(serializer="json")
MESSAGE = TaskMessage(id="t1", task="shop.resize", queue="q", body=b"\x93\x90\x80\x80")


def with_headers(**headers):
    envelope = CODEC.to_envelope(MESSAGE)
    changed = {name.replace("__", "-"): value for name, value in headers.items()}
    return dataclasses.replace(envelope, headers={**envelope.headers, **changed})


def message_of(body, content_type="application/x-msgpack"):
    return dataclasses.replace(MESSAGE, body=body, content_type=content_type)


def one_line_error(caught):
    text = str(caught.value)
    return "\n" not in text and text.isprintable() and 10 < len(text) < 500


# -- a message there and back ------------------------------------------------------------------

names = st.text(st.characters(codec="utf-8", exclude_categories=["C", "Z"]), min_size=1)
maybe_names = st.none() | names
counts = st.integers(0, 2**31 - 1)
times = st.none() | st.integers(0, 253370764799 * 10**6).map(lambda us: round(us / 1e6, 6))
seconds = st.none() | st.floats(0.001, 1e6)
headers = st.none() | st.integers(-(2**63), 2**63 - 1) | st.text() | st.binary() | st.booleans()
messages = st.builds(
    TaskMessage,
    id=names,
    task=names,
    queue=st.just("q"),
    body=st.binary(),
    content_type=st.sampled_from(["application/json", "application/x-msgpack"]),
    content_encoding=st.sampled_from(["utf-8", "binary"]),
    root_id=maybe_names,
    parent_id=maybe_names,
    group=maybe_names,
    eta=times,
    expires=times,
    time_limit=seconds,
    soft_time_limit=seconds,
    argsrepr=st.none() | names,
    kwargsrepr=st.none() | names,
    origin=st.none() | names,
    reply_to=maybe_names,
    session=maybe_names,
    resubmit_count=counts,
    snooze_count=counts,
    hop=counts,
    generation=counts,
    delivery_base=counts,
    unknown_since=st.none() | st.floats(0, 2e9),
    saved=st.none() | st.binary(),
    extra=st.dictionaries(names.map("x-{}".format), headers | st.lists(headers), max_size=3),
)


@given(messages, st.booleans())
def test_every_message_comes_back_equal(message, signed):
    codec = Codec(signing_keys=[b"k" * 32] if signed else ())
    result = codec.from_envelope(codec.to_envelope(message), "q")
    for name in ("eta", "expires"):  # written to the microsecond, which a float rounds
        sent, read = getattr(message, name), getattr(result, name)
        assert sent == read or abs(sent - read) < 1e-4
        message, result = (dataclasses.replace(m, **{name: None}) for m in (message, result))
    assert result == message


def test_an_envelope_carries_what_services_act_on():
    message = dataclasses.replace(
        MESSAGE, session="s", expires=1e9, reply_to="answers", hop=1, generation=2
    )
    envelope = CODEC.to_envelope(message, delay=5.0)
    assert envelope.message_id == "t1:2:1"
    assert envelope.subject == "shop.resize"
    assert envelope.correlation_id == "t1"
    assert (envelope.session, envelope.expires_at, envelope.delay) == ("s", 1e9, 5.0)
    assert envelope.properties == {"reply_to": "answers"}
    assert envelope.body is message.body


def test_headers_follow_protocol_2_and_leave_out_what_is_not_set():
    message = dataclasses.replace(
        MESSAGE, resubmit_count=2, hop=2, eta=0.5, time_limit=9.0, traceparent="00-a-b-01"
    )
    assert dict(CODEC.to_envelope(message).headers) == {
        "lang": "py",
        "task": "shop.resize",
        "id": "t1",
        "retries": 2,
        "eta": "1970-01-01T00:00:00.500000+00:00",
        "timelimit": [9.0, None],
        "traceparent": "00-a-b-01",
        "aztask-version": 1,
        "aztask-hop": 2,
        "aztask-generation": 0,
        "aztask-resubmit-count": 2,
    }


@pytest.mark.parametrize(
    "fields",
    [
        {"id": ""},
        {"id": "a\0b"},
        {"id": "a\nb"},
        {"id": "\ud800"},
        {"id": "x" * 1025},
        {"id": 7},
        {"task": ""},
        {"task": "x" * 513},
        {"session": "s" * 129},
        {"correlation_id": "\x1b"},
        {"eta": float("nan")},
        {"expires": 253370764800.0},
        {"expires": -1.0},
        {"extra": {"x": object()}},
        {"extra": {"x": "\ud800"}},
        {"extra": {"x": 2**63}},
        {"extra": {"x" * 2000: 1}},
    ],
)
def test_what_no_reader_would_accept_is_not_written(fields):
    with pytest.raises(EncodeError) as caught:
        CODEC.to_envelope(dataclasses.replace(MESSAGE, **fields))
    assert one_line_error(caught)


# -- headers from outside ----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("header", "value"),
    [
        ("task", 7),
        ("task", ""),
        ("task", "a\0b"),
        ("task", "x" * 513),
        ("id", "x" * 1025),
        ("id", "\ud800"),
        ("id", b"bytes"),
        ("root_id", "a\nb"),
        ("group", ["list"]),
        ("retries", -1),
        ("retries", 2**63),
        pytest.param("retries", 10**5000, id="retries-huge"),
        ("retries", True),
        ("retries", 1.5),
        ("retries", "1"),
        ("aztask__hop", -1),
        ("aztask__generation", 2**31),
        ("aztask__snooze-count", float("nan")),
        ("aztask__delivery-base", -(2**63)),
        ("aztask__saved", "text"),
        ("aztask__unknown-since", float("inf")),
        ("aztask__version", 2),
        ("aztask__version", True),
        ("aztask__version", "1"),
        ("eta", "tomorrow"),
        ("eta", "9999-12-31T23:59:59+00:00"),
        ("eta", "9999-12-31T23:59:59-23:59"),
        ("eta", "0001-01-01T00:00:00+23:59"),
        ("eta", "1969-12-31T23:59:59Z"),
        ("eta", "2" * 100),
        ("eta", float("nan")),
        ("eta", 1e300),
        ("eta", 10**400),
        ("eta", {}),
        ("expires", -1),
        ("expires", True),
        ("timelimit", 5),
        ("timelimit", [1]),
        ("timelimit", [-1, None]),
        ("timelimit", [0, None]),
        ("timelimit", ["1", None]),
        ("timelimit", [float("inf"), None]),
        ("argsrepr", 7),
        ("traceparent", "x\ny"),
        ("x__custom", "\ud800"),
        ("x__custom", 2**64),
        ("x__custom", object()),
        ("x__custom", msgpack.ExtType(5, b"x")),
        ("x__custom", [{"a": msgpack.ExtType(5, b"x")}]),
        ("x__custom", msgpack.Timestamp(1, 2)),
        ("timelimit", msgpack.ExtType(5, b"x")),
        ("x__custom", {"a": {7: 1}}),
        ("x__custom", list(range(1000))),
        ("x__custom", "x" * 40_000),
    ],
)
def test_bad_headers_are_one_line_decode_errors(header, value):
    with pytest.raises(DecodeError) as caught:
        CODEC.from_envelope(with_headers(**{header: value}), "q")
    assert one_line_error(caught)


def test_a_bad_header_is_named():
    with pytest.raises(DecodeError, match=r"aztask-hop -7 is not between 0 and 2147483647"):
        CODEC.from_envelope(with_headers(aztask__hop=-7), "q")


def test_a_header_nested_very_deep_is_refused_without_recursion():
    value = []
    for _ in range(100_000):
        value = [value]
    with pytest.raises(DecodeError, match="levels deep"):
        CODEC.from_envelope(with_headers(x=value), "q")
    while value:  # or freeing it recurses
        value = value.pop()


def test_times_are_read_in_every_usual_form():
    for text in ("2020-01-01T00:00:00", "2020-01-01T00:00:00Z", "2020-01-01T01:00:00+01:00"):
        assert CODEC.from_envelope(with_headers(eta=text), "q").eta == 1577836800.0
    assert CODEC.from_envelope(with_headers(expires=1577836800), "q").expires == 1577836800.0


def test_texts_for_the_eye_are_cleaned_not_refused():
    message = CODEC.from_envelope(with_headers(argsrepr="\x1b[31m" + "x" * 5000), "q")
    assert message.argsrepr.startswith("?[31mx")
    assert len(message.argsrepr) == 512


def test_unknown_headers_are_carried_on():
    message = CODEC.from_envelope(with_headers(tracestate="a=b", stamps={"x": [1]}), "q")
    assert message.extra == {"tracestate": "a=b", "stamps": {"x": [1]}}
    assert CODEC.to_envelope(message.resubmitted(counted=True)).headers["tracestate"] == "a=b"


@pytest.mark.parametrize(
    "changes",
    [
        {"body": "text"},
        {"headers": None},
        {"headers": {}},
        {"headers": {"task": "x"}},
        {"headers": {"id": "x"}},
        {"session": "\n"},
        {"session": 7},
        {"correlation_id": "\0"},
        {"properties": {"reply_to": 7}},
        {"content_type": "application/x-python-serialize"},
        {"content_type": "application/x-yaml"},
        {"content_type": "application/data"},
        {"content_type": "text/plain"},
        {"content_type": ""},
        {"content_type": None},
        {"content_type": "\ud800"},
        {"content_encoding": "gzip"},
        {"content_encoding": None},
    ],
)
def test_bad_envelopes_are_one_line_errors(changes):
    with pytest.raises(CodecError) as caught:
        CODEC.from_envelope(dataclasses.replace(CODEC.to_envelope(MESSAGE), **changes), "q")
    assert one_line_error(caught)


anything = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text() | st.binary(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text() | st.integers(), inner),
    max_leaves=8,
)
known_headers = st.sampled_from(
    ["task", "id", "eta", "expires", "retries", "timelimit", "group", "aztask-version",
     "aztask-hop", "aztask-saved", "aztask-signature", "compression", "argsrepr"]
)  # fmt: skip


@given(
    body=st.binary() | anything,
    headers=st.dictionaries(known_headers | anything.filter(lambda x: x.__hash__), anything),
    valid=st.booleans(),
    properties=st.dictionaries(st.sampled_from(["body_encoding", "reply_to"]), anything),
    other=st.tuples(anything, anything, anything, anything),
)
def test_any_envelope_gives_a_message_or_a_codec_error(body, headers, valid, properties, other):
    if valid:
        signature = f"2:1:1:hmac-sha256:{64 * '0'}"
        headers = {"task": "t", "id": "i", "aztask-signature-2": signature, **headers}
    content_type, encoding, correlation_id, session = other
    envelope = Envelope(
        body=body,
        headers=headers,
        content_type="application/json" if valid else content_type,
        content_encoding="utf-8" if valid else encoding,
        correlation_id=None if valid else correlation_id,
        session=None if valid else session,
        properties=properties,
    )
    for codec in (CODEC, Codec(signing_keys=[b"k" * 32])):
        try:
            message = codec.from_envelope(envelope, "q")
        except CodecError as error:
            assert "\n" not in str(error)
        else:
            codec.to_envelope(message.resubmitted(counted=True))


# -- arguments ---------------------------------------------------------------------------------

json_scalars = st.none() | st.booleans() | st.integers(-(2**63), 2**63) | st.text()
json_values = st.recursive(
    json_scalars | st.floats(allow_nan=False, allow_infinity=False) | st.uuids() | st.dates(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
    max_leaves=15,
).filter(lambda value: "__type__" not in repr(value))
keywords = st.text().filter(lambda name: name not in ("self", "__type__"))


def encodable(text):
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


@given(
    st.sampled_from([CODEC, JSON_CODEC]),
    st.lists(json_values),
    st.dictionaries(keywords, json_values),
)
def test_arguments_come_back(codec, args, kwargs):
    body, content_type, encoding = codec.encode_arguments(args, kwargs)
    message = dataclasses.replace(
        MESSAGE, body=body, content_type=content_type, content_encoding=encoding
    )
    assert codec.decode_arguments(message) == (tuple(args), kwargs)


def test_the_stated_types_come_back():
    args = (
        dt.datetime(2024, 2, 29, 12, tzinfo=dt.UTC), dt.timedelta(days=-1), Decimal("1.10"),
        uuid.UUID(int=5), 10**5000, float("inf"), {1: "a", b"k": 2},
    )  # fmt: skip
    body, *_ = CODEC.encode_arguments(args, {})
    assert CODEC.decode_arguments(message_of(body))[0] == args


class Opaque:
    pass


def deep_list(depth):
    value = []
    for _ in range(depth):
        value = [value]
    return value


@pytest.mark.parametrize("codec", [CODEC, JSON_CODEC], ids=["msgpack", "json"])
@pytest.mark.parametrize(
    ("args", "kwargs"),
    [
        ("text", {}),
        ({1: 2}, {}),
        (None, {}),
        ([], []),
        ([], {"self": 1}),
        ([], {1: 1}),
        (["\ud800"], {}),
        (["\ud83d\ud83d\ude00"], {}),
        ([], {"\udfff": 1}),
        ([Opaque()], {}),
        ([{1, 2}], {}),
        ([deep_list(200)], {}),
        ([deep_list(5000)], {}),
        ([10**20_000], {}),
    ],
)
def test_bad_arguments_are_one_line_errors(codec, args, kwargs):
    with pytest.raises((EncodeError, ContentRefused)) as caught:
        codec.encode_arguments(args, kwargs)
    assert one_line_error(caught)


@pytest.mark.parametrize(
    "value",
    [float("nan"), float("inf"), -float("inf"), 10**5000],
    ids=["nan", "inf", "-inf", "5001 digits"],
)
def test_json_refuses_what_json_does_not_have(value):
    with pytest.raises(EncodeError) as caught:
        JSON_CODEC.encode_arguments([value], {})
    assert one_line_error(caught)


def test_json_takes_texts_that_look_like_what_it_does_not_have():
    args = ("NaN", "Infinity", "\\ud800", "😀", "\\\\ud83d")
    body, content_type, _ = JSON_CODEC.encode_arguments(args, {})
    assert JSON_CODEC.decode_arguments(message_of(body, content_type)) == (args, {})


def test_a_list_that_holds_itself_is_refused():
    loop = []
    loop.append(loop)
    for codec in (CODEC, JSON_CODEC):
        with pytest.raises(EncodeError):
            codec.encode_arguments(loop, {})


def test_encoder_and_decoder_share_their_limits():
    for name in ("msgpack", "json"):
        codec = Codec(serializer=name, limits=MessageLimits(body_bytes=500, depth=6, items=50))
        for args in ([[[[[1]]]]], [[[[[[[1]]]]]]], [0] * 40, [0] * 60, ["x" * 400], ["x" * 600]):
            try:
                body, content_type, _ = codec.encode_arguments(args, {})
            except ContentRefused:
                generous, content_type, _ = Codec(serializer=name).encode_arguments(args, {})
                with pytest.raises(ContentRefused):
                    codec.decode_arguments(message_of(generous, content_type))
            else:
                assert codec.decode_arguments(message_of(body, content_type))[0] == tuple(args)


def pack(value):
    return msgpack.packb(value)


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"\xc1",
        pack(None),
        pack([[], {}]),
        pack([[], {}, {}, {}]),
        pack({"task": "t", "id": "i", "args": [], "kwargs": {}}),
        pack(["abc", {}, {}]),
        pack([[], [], {}]),
        pack([[], {b"x": 1}, {}]),
        pack([[], {1: 1}, {}]),
        pack([[], {"self": 1}, {}]),
        pack([[], {}, []]),
        b"\x93\x91\xa1\xff\x80\x80",
        b"\x93\x90\x81\x90\x00\x80",
        pack([[msgpack.ExtType(99, b"")], {}, {}]),
        b"\x93\x91\xc7\x0c\xff" + b"\xff" * 12 + b"\x80\x80",
    ],
)
def test_bad_bodies_are_one_line_decode_errors(body):
    with pytest.raises(DecodeError) as caught:
        CODEC.decode_arguments(message_of(body))
    assert one_line_error(caught)


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"null",
        b"[[],{}]",
        b"[[NaN],{},{}]",
        b"[[-Infinity],{},{}]",
        b'[["\\ud800"],{},{}]',
        b'[["\\uDFFF"],{},{}]',
        b"[[" + b"9" * 5000 + b"],{},{}]",
        b'[[{"__type__":"uuid","__value__":{"hex":"x"}}],{},{}]',
        b'[[{"__type__":["list"],"__value__":1}],{},{}]',
        b'[[{"__type__":"os.system","__value__":"ls"}],{},{}]',
        b"\xff\xfe[\x00]\x00",
        b"\xef\xbb\xbf[]",
        b"[[],{},{}] x",
        b'[["\n"],{},{}]',
    ],
)
def test_bad_json_bodies_are_one_line_decode_errors(body):
    with pytest.raises(DecodeError) as caught:
        CODEC.decode_arguments(message_of(body, "application/json"))
    assert one_line_error(caught)


@given(st.binary(), st.sampled_from(["application/json", "application/x-msgpack"]))
def test_any_body_gives_arguments_or_a_codec_error(body, content_type):
    try:
        args, kwargs = CODEC.decode_arguments(message_of(body, content_type))
    except CodecError as error:
        assert "\n" not in str(error)
    else:
        assert isinstance(args, tuple)
        assert isinstance(kwargs, dict)


json_pieces = [*b'[]{}",:\\a1', b"NaN", b"\\ud800", b"\xff", b'"__type__"', b"[[],{},{}]"]


@given(
    st.lists(st.sampled_from(json_pieces).map(lambda p: p if isinstance(p, bytes) else bytes([p])))
)
def test_any_json_like_body_gives_arguments_or_a_codec_error(pieces):
    try:
        CODEC.decode_arguments(message_of(b"".join(pieces), "application/json"))
    except CodecError as error:
        assert "\n" not in str(error)


BOMBS = {
    "claimed items": b"\xdd\xff\xff\xff\xff",
    "nested claims": b"\xdd\x00\x01\x00\x00" * 13_000,
    "deep": b"\x91" * 100_000,
    "many empty maps": b"\x93\xdd\x00\x0f\x42\x41" + b"\x80" * 1_000_001 + b"\x80\x80",
    "json deep": b"[" * 100_000,
    "json many": b"[" + b"{}," * 1_000_001 + b"{}]",
}


@pytest.mark.parametrize("body", BOMBS.values(), ids=BOMBS.keys())
def test_a_bomb_is_refused_before_it_takes_memory(body):
    kind = "application/json" if body[:1] == b"[" else "application/x-msgpack"
    tracemalloc.start()
    try:
        with pytest.raises(CodecError):
            CODEC.decode_arguments(message_of(body, kind))
        assert tracemalloc.get_traced_memory()[1] < 1_000_000
    finally:
        tracemalloc.stop()


def test_memory_is_bounded_by_the_number_of_items():
    codec = Codec(limits=MessageLimits(items=50_000))
    body = b"\x93\xdc\xc0\x00" + b"\x80" * 0xC000 + b"\x80\x80"
    tracemalloc.start()
    try:
        codec.decode_arguments(message_of(body))
        assert tracemalloc.get_traced_memory()[1] < 50_000 * 80 + 100_000
    finally:
        tracemalloc.stop()


def test_an_oversize_body_is_refused_by_its_size_alone():
    codec = Codec(limits=MessageLimits(body_bytes=100))
    with pytest.raises(ContentRefused, match="101 bytes, more than the 100 allowed"):
        codec.from_envelope(CODEC.to_envelope(message_of(b"x" * 101)), "q")


# -- formats that are refused ------------------------------------------------------------------


class Bomb:
    def __reduce__(self):
        return (sys.exit, ("unpickled",))


def test_pickle_is_never_loaded():
    message = message_of(pickle.dumps(Bomb()), "application/x-python-serialize")
    with pytest.raises(ContentRefused, match="not accepted"):
        CODEC.decode_arguments(message)


@pytest.mark.parametrize("name", ["pickle", "yaml", "raw", "jsno", "", None, 7, "application/json"])
def test_other_serializers_cannot_be_configured(name):
    with pytest.raises(ConfigurationError, match="there are msgpack and json"):
        Codec(serializer=name)
    with pytest.raises(ConfigurationError, match="there are msgpack and json"):
        Codec(accept=["json", name])


def test_only_what_is_on_the_accept_list_is_read():
    body, content_type, _ = JSON_CODEC.encode_arguments([], {})
    with pytest.raises(ContentRefused, match="application/x-msgpack"):
        Codec(accept=["msgpack"]).decode_arguments(message_of(body, content_type))


# -- Celery's messages -------------------------------------------------------------------------


def celery_envelope(embed=None, **changes):
    """As Celery 5 sends it with json, protocol 2 (its documentation, "Message Protocol")."""
    fields = {
        "body": json.dumps(
            [[1, 2], {"z": 3}, embed or dict.fromkeys(["callbacks", "errbacks", "chain", "chord"])]
        ).encode(),
        "headers": {
            "lang": "py", "task": "tasks.add", "id": "4cc7438e", "root_id": "4cc7438e",
            "parent_id": None, "group": None, "group_index": None, "shadow": None,
            "eta": "2030-01-01T00:00:00+00:00", "expires": None, "retries": 1,
            "timelimit": [30, None], "argsrepr": "(1, 2)", "kwargsrepr": "{'z': 3}",
            "origin": "gen1@host", "ignore_result": False, "replaced_task_nesting": 0,
            "stamped_headers": None, "stamps": {},
        },
        "content_type": "application/json",
        "content_encoding": "utf-8",
        "correlation_id": "4cc7438e",
        "properties": {"reply_to": "answers", "delivery_mode": 2, "priority": 0},
    }  # fmt: skip
    return Envelope(**{**fields, **changes})


def test_a_message_of_celery_is_read():
    message = CODEC.from_envelope(celery_envelope(), "celery")
    assert (message.id, message.task, message.queue) == ("4cc7438e", "tasks.add", "celery")
    assert (message.resubmit_count, message.hop, message.generation) == (1, 0, 0)
    assert (message.time_limit, message.soft_time_limit) == (30.0, None)
    assert message.eta == 1893456000.0
    assert (message.reply_to, message.correlation_id) == ("answers", None)
    assert message.extra["ignore_result"] is False
    assert CODEC.decode_arguments(message) == ((1, 2), {"z": 3})


def test_base64_and_compressed_bodies_of_kombu_are_read():
    plain = celery_envelope()
    for kind, data in {
        None: plain.body,
        "application/x-gzip": zlib.compress(plain.body),
    }.items():
        envelope = celery_envelope(
            body=base64.b64encode(data),
            headers={**plain.headers, "compression": kind},
            properties={"body_encoding": "base64"},
        )
        message = CODEC.from_envelope(envelope, "celery")
        assert CODEC.decode_arguments(message) == ((1, 2), {"z": 3})
        assert "compression" not in message.extra


@pytest.mark.parametrize("body", [b"a", b"ab=c", b"!!!!", b"\xff\xff"])
def test_what_only_claims_to_be_base64_is_refused(body):
    with pytest.raises(DecodeError, match="base64"):
        CODEC.from_envelope(celery_envelope(body=body, properties={"body_encoding": "base64"}), "q")


def test_a_compressed_bomb_is_refused():
    codec = Codec(limits=MessageLimits(body_bytes=1000))
    headers = {**celery_envelope().headers, "compression": "application/x-gzip"}
    bomb = celery_envelope(body=zlib.compress(bytes(100_000)), headers=headers)
    with pytest.raises(ContentRefused, match="1000 allowed"):
        codec.from_envelope(bomb, "q")


@pytest.mark.parametrize("part", ["callbacks", "errbacks", "chain", "chord"])
def test_what_a_message_embeds_is_decoded_apart(part):
    message = CODEC.from_envelope(celery_envelope(embed={part: [{"task": "x"}]}), "q")
    assert CODEC.decode_arguments(message)[0] == (1, 2)
    assert CODEC.decode_embed(message)[part] == [{"task": "x"}]


def test_protocol_1_is_refused_with_the_setting_that_helps():
    body = json.dumps({"task": "tasks.add", "id": "i", "args": [], "kwargs": {}}).encode()
    with pytest.raises(DecodeError, match="task_protocol = 2"):
        CODEC.from_envelope(celery_envelope(body=body, headers={}), "q")


# -- results and checkpoints -------------------------------------------------------------------


@given(json_values)
def test_values_come_back(value):
    assert CODEC.decode_value(JSON_CODEC.encode_value(value)) == value


@pytest.mark.parametrize("value", [Opaque(), {1}, "\ud800", deep_list(200), deep_list(5000)])
def test_values_without_an_encoding_are_one_line_errors(value):
    with pytest.raises(CodecError) as caught:
        CODEC.encode_value(value)
    assert one_line_error(caught)


@given(st.binary())
def test_any_bytes_give_a_value_or_a_codec_error(data):
    try:
        CODEC.decode_value(data)
    except CodecError as error:
        assert "\n" not in str(error)


@pytest.mark.parametrize("data", ["text", None, bytearray(b"\xc0")])
def test_a_value_is_bytes(data):
    with pytest.raises(DecodeError, match="bytes"):
        CODEC.decode_value(data)


def test_kombu_reads_and_writes_the_same_after_register():
    register_msgpack()
    register_msgpack()
    value = {"at": dt.datetime(2024, 1, 2, 3, 4, 5), "id": uuid.UUID(int=7)}
    content_type, encoding, body = serialization.dumps(value, "msgpack")
    assert (content_type, encoding, body) == (serializer.MSGPACK, "binary", serializer.pack(value))
    assert serialization.loads(body, content_type, encoding, accept={serializer.MSGPACK}) == value


# -- at the edges ------------------------------------------------------------------------------

KEY = b"k" * 32
SIGNING = Codec(signing_keys=[KEY])


@pytest.mark.parametrize("encoding", ["binary", "utf-8", "UTF-8", "utf8", "us-ascii", "ascii"])
@pytest.mark.parametrize(
    "content_type", ["application/json", "application/json; charset=utf-8", " Application/JSON "]
)
def test_the_usual_ways_to_write_content_type_and_encoding_are_read(content_type, encoding):
    envelope = dataclasses.replace(
        CODEC.to_envelope(MESSAGE), content_type=content_type, content_encoding=encoding
    )
    message = CODEC.from_envelope(envelope, "q")
    assert (message.content_type, message.content_encoding) == ("application/json", encoding)


def test_a_plain_envelope_says_no_more_than_it_must():
    assert CODEC.to_envelope(MESSAGE) == Envelope(
        body=MESSAGE.body,
        headers={
            "lang": "py",
            "task": "shop.resize",
            "id": "t1",
            "retries": 0,
            "aztask-version": 1,
            "aztask-hop": 0,
            "aztask-generation": 0,
            "aztask-resubmit-count": 0,
        },
        message_id="t1:0:0",
        subject="shop.resize",
        correlation_id="t1",
        partition_key=None,
        delay=0.0,
        properties={},
    )


def test_a_message_of_a_conversation_keeps_its_properties():
    message = dataclasses.replace(MESSAGE, correlation_id="c", reply_to="answers", session="s")
    envelope = CODEC.to_envelope(message, delay=2.0)
    assert (envelope.correlation_id, envelope.session, envelope.delay) == ("c", "s", 2.0)
    assert envelope.properties == {"reply_to": "answers"}
    assert CODEC.from_envelope(envelope, "q") == message
    bare = dataclasses.replace(envelope, correlation_id=None, session=None, properties={})
    assert CODEC.from_envelope(bare, "q") == MESSAGE


@pytest.mark.parametrize(
    ("changed", "named"),
    [
        ({"correlation_id": ""}, "correlation_id"),
        ({"session": "x" * 129}, "session"),
        ({"properties": {"reply_to": "\0"}}, "reply_to"),
    ],
)
def test_a_property_that_cannot_be_is_named(changed, named):
    envelope = dataclasses.replace(CODEC.to_envelope(MESSAGE), **changed)
    with pytest.raises(DecodeError, match=f"^{named} "):
        CODEC.from_envelope(envelope, "q")


@pytest.mark.parametrize(
    "changed", [{"body": "text"}, {"body": None}, {"headers": None}, {"headers": [("task", "a")]}]
)
def test_what_is_no_envelope_is_refused_as_such(changed):
    envelope = dataclasses.replace(CODEC.to_envelope(MESSAGE), **changed)
    for codec in (CODEC, SIGNING):
        with pytest.raises(DecodeError, match=r"^an envelope is a body of bytes and a map"):
            codec.from_envelope(envelope, "q")


def test_only_a_body_that_claims_to_be_base64_is_read_as_such():
    body = base64.b64encode(MESSAGE.body)
    for encoding, expected in (("base64", MESSAGE.body), ("BASE64", MESSAGE.body), ("x", body)):
        envelope = dataclasses.replace(
            CODEC.to_envelope(MESSAGE), body=body, properties={"body_encoding": encoding}
        )
        assert CODEC.from_envelope(envelope, "q").body == expected


@pytest.mark.parametrize("embed", [None, {}, {"chain": None, "callbacks": []}])
def test_what_embeds_nothing_is_read(embed):
    message = message_of(msgpack.packb([[1], {"a": 2}, embed]))
    assert CODEC.decode_arguments(message) == ((1,), {"a": 2})


@pytest.mark.parametrize("content_type", ["application/x-python-serialize", "", "text/plain"])
def test_a_body_of_another_kind_is_not_read(content_type):
    with pytest.raises(ContentRefused, match="is not read here"):
        CODEC.decode_body(b"\x80", content_type)


def test_what_passes_the_limits_and_still_cannot_be_read_is_named():
    with pytest.raises(DecodeError, match=r"^the value cannot be read: 'utf-8' codec"):
        CODEC.decode_value(b"\xa1\xff")
    with pytest.raises(DecodeError, match=r"^the body cannot be read: "):
        CODEC.decode_body(b"\xa1\xff", "application/x-msgpack")


@pytest.mark.parametrize("name", [[], {}, None, 7, b"json", "pickle", "yaml"])
def test_a_serializer_that_is_not_there_is_shown(name):
    with pytest.raises(ConfigurationError, match="is not available; there are msgpack and json"):
        Codec(serializer=name)


def test_the_serializer_and_the_reason_are_named():
    with pytest.raises(EncodeError, match=r"^the value cannot be written as msgpack: "):
        CODEC.encode_value(object())
    with pytest.raises(EncodeError, match=r"^the arguments cannot be written as json: Object of"):
        JSON_CODEC.encode_arguments([object()], {})


@pytest.mark.parametrize(
    ("error", "reason"),
    [(ValueError("x" * 300), "x" * 197 + "..."), (OverflowError(), "OverflowError")],
)
def test_a_reason_is_short_and_never_empty(monkeypatch, error, reason):
    def fail(value):
        raise error

    monkeypatch.setattr(serializer, "pack", fail)
    with pytest.raises(EncodeError) as caught:
        CODEC.encode_value(1)
    assert str(caught.value) == f"the value cannot be written as msgpack: {reason}"


# -- what is signed ----------------------------------------------------------------------------


def signed_by_hand(headers, *parts, **changed):
    """An envelope of some other producer, with a signature over these parts."""
    framed = b"aztask:1" + b"".join(len(part).to_bytes(8, "big") + part for part in parts)
    signature = "hmac-sha256:" + hmac.digest(KEY, framed, "sha256").hex()
    return Envelope(
        **{"body": b"body", "headers": {**headers, "aztask-signature": signature}, **changed}
    )


KIND = (b"application/x-msgpack", b"binary")


@pytest.mark.parametrize(
    ("headers", "counters", "saved"),
    [
        ({}, (b"0", b"0"), b""),  # an absent counter counts as 0
        ({"aztask-generation": 7, "aztask-hop": 12}, (b"7", b"12"), b""),
        ({"aztask-generation": None, "aztask-hop": None}, (b"", b""), b""),
        ({"aztask-saved": b"page"}, (b"0", b"0"), b"page"),
        ({"aztask-saved": bytearray(b"page")}, (b"0", b"0"), b"page"),
        ({"aztask-saved": memoryview(b"page")}, (b"0", b"0"), b"page"),
    ],
)
def test_others_can_compute_what_is_signed(headers, counters, saved):
    envelope = signed_by_hand(
        {"task": "é", "id": "t1", **headers},
        *(b"body", "é".encode(), b"t1", b"q", *counters, *KIND, saved),
    )
    assert SIGNING.from_envelope(envelope, "q").task == "é"


@pytest.mark.parametrize(
    ("value", "part"),
    [(2**64 - 1, b"%d" % (2**64 - 1)), (-(2**64) + 1, b"%d" % (-(2**64) + 1)), ("\udcff", None)],
)
def test_a_signature_is_checked_before_what_it_covers_is(value, part):
    """It fits, so what comes out is the refusal of the header itself."""
    part = part or value.encode("utf-8", "surrogatepass")
    headers = {"task": "a", "id": "t1", "aztask-hop": value}
    envelope = signed_by_hand(headers, b"body", b"a", b"t1", b"q", b"0", part, *KIND, b"")
    with pytest.raises(DecodeError, match="aztask-hop"):
        SIGNING.from_envelope(envelope, "q")


@pytest.mark.parametrize("value", [1.5, True, 2**64, -(2**64), 3**64, [1], b"1"])
def test_what_cannot_be_signed_is_refused(value):
    envelope = with_headers(aztask__hop=value)
    with pytest.raises(DecodeError, match=r"a signed header holds|header aztask-hop"):
        SIGNING.from_envelope(envelope, "q")


@pytest.mark.parametrize(
    "text", ["NaN", "-Infinity", "1e999", '{"a": 1e999}', "\\ud800", "\\u0000"]
)
def test_what_would_be_suspicious_in_json_is_any_text_in_msgpack(text):
    codec = Codec()
    assert codec.decode_value(codec.encode_value([text])) == [text]
    assert codec.decode_body(codec.encode_value([text]), "application/x-msgpack") == [text]


@pytest.mark.parametrize(
    "value", [{(1, 2): 3}, {(): 1}, [{"a": 1, (1,): 2}], ({"a": {(1,): [2]}},)]
)
def test_what_is_written_and_could_not_be_read_is_refused_when_it_is_made(value):
    with pytest.raises(
        EncodeError, match="the value cannot be written as msgpack: a dict has a tuple"
    ):
        CODEC.encode_value(value)
    with pytest.raises(
        EncodeError, match="the arguments cannot be written as msgpack: a dict has a"
    ):
        CODEC.encode_arguments([value], {})
