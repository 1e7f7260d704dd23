"""Signatures: what they cover, how keys rotate, what a forger gets to see."""

import dataclasses
import hashlib
import hmac

import pytest
from hypothesis import given
from hypothesis import strategies as st

from aztask.codec import Codec
from aztask.errors import ConfigurationError, ContentRefused
from aztask.message import TaskMessage
from aztask.signing import SCHEME, Signer

OLD, NEW, OTHER = b"o" * 32, b"n" * 32, b"x" * 32
MESSAGE = TaskMessage(
    id="t1", task="shop.pay", queue="pay", body=b"\x93\x90\x80\x80", hop=2, generation=1, saved=b"s"
)


def test_the_signature_can_be_computed_by_others():
    framed = b"aztask:1" + bytes(7) + b"\x01a" + bytes(7) + b"\x02bc"
    expected = hmac.new(OLD, framed, hashlib.sha256).hexdigest()
    assert Signer([OLD]).sign([b"a", b"bc"]) == "hmac-sha256:" + expected


def test_keys_rotate_without_refusing_anything():
    before, during, after = (
        Codec(signing_keys=[OLD]),
        Codec(signing_keys=[NEW, OLD]),
        Codec(signing_keys=[NEW]),
    )
    old_envelope, new_envelope = before.to_envelope(MESSAGE), during.to_envelope(MESSAGE)
    assert during.from_envelope(old_envelope, "pay") == MESSAGE
    assert during.from_envelope(new_envelope, "pay") == MESSAGE
    assert after.from_envelope(new_envelope, "pay") == MESSAGE
    with pytest.raises(ContentRefused, match="signature does not match"):
        after.from_envelope(old_envelope, "pay")


@pytest.mark.parametrize("keys", [b"k" * 32, "key", [b"short"], ["k" * 32], [b"k" * 32, None]])
def test_bad_keys_are_refused_without_being_shown(keys):
    with pytest.raises(ConfigurationError) as caught:
        Signer(keys)
    assert "kkk" not in str(caught.value)
    assert "short'" not in str(caught.value)


def test_a_signer_never_shows_its_keys():
    assert repr(Signer([b"secret-key-of-32-bytes-0123456789"])) == "<Signer: 1 keys>"


FORGERIES = {
    "body": {"body": b"\x93\x91\x01\x80\x80"},
    "content type": {"content_type": "application/json"},
    "content encoding": {"content_encoding": "utf-8"},
}


@pytest.mark.parametrize("changed", FORGERIES.values(), ids=FORGERIES.keys())
def test_a_changed_envelope_is_refused(changed):
    codec = Codec(signing_keys=[OLD])
    forged = dataclasses.replace(codec.to_envelope(MESSAGE), **changed)
    with pytest.raises(ContentRefused, match="signature does not match"):
        codec.from_envelope(forged, "pay")


@pytest.mark.parametrize(
    ("header", "value"),
    [
        ("task", "shop.refund"),
        ("id", "t2"),
        ("aztask-hop", 0),
        ("aztask-hop", None),
        ("aztask-generation", 2),
        ("aztask-saved", b"t"),
        ("aztask-saved", None),
        ("aztask-signature", SCHEME + "0" * 64),
        ("aztask-signature", "ünïcödé"),
    ],
)
def test_a_changed_header_is_refused(header, value):
    codec = Codec(signing_keys=[OLD])
    envelope = codec.to_envelope(MESSAGE)
    forged = dataclasses.replace(envelope, headers={**envelope.headers, header: value})
    with pytest.raises(ContentRefused, match="signature does not match"):
        codec.from_envelope(forged, "pay")


def test_a_message_moved_to_another_queue_is_refused():
    codec = Codec(signing_keys=[OLD])
    with pytest.raises(ContentRefused, match="another queue"):
        codec.from_envelope(codec.to_envelope(MESSAGE), "admin")


@pytest.mark.parametrize("signature", [None, "", b"bytes", 7])
def test_an_unsigned_message_is_refused_where_keys_are_configured(signature):
    codec = Codec(signing_keys=[OLD])
    envelope = codec.to_envelope(MESSAGE)
    unsigned = dataclasses.replace(
        envelope, headers={**envelope.headers, "aztask-signature": signature}
    )
    with pytest.raises(ContentRefused, match="not signed"):
        codec.from_envelope(unsigned, "pay")


def test_the_signature_is_checked_before_the_headers_are_read():
    codec = Codec(signing_keys=[OLD])
    envelope = codec.to_envelope(MESSAGE)
    broken = dataclasses.replace(
        envelope, headers={**envelope.headers, "task": "\0", "retries": -1}
    )
    with pytest.raises(ContentRefused, match="signature"):
        codec.from_envelope(broken, "pay")


def test_without_keys_a_signed_message_is_read_like_any_other():
    assert Codec().from_envelope(Codec(signing_keys=[OLD]).to_envelope(MESSAGE), "pay") == MESSAGE


@given(st.lists(st.binary(max_size=8), max_size=4), st.lists(st.binary(max_size=8), max_size=4))
def test_different_parts_never_share_a_signature(left, right):
    signer = Signer([OTHER])
    assert (signer.sign(left) == signer.sign(right)) == (left == right)
