"""Signatures: what they cover, how keys rotate, what a forger gets to see."""

import dataclasses
import hashlib
import hmac

import pytest
from hypothesis import given
from hypothesis import strategies as st

from aztask.errors import ConfigurationError, ContentRefused
from aztask.message.codec import Codec
from aztask.message.message import TaskMessage
from aztask.message.signatures import SCHEME, Signer

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


@pytest.mark.parametrize("keys", [b"k" * 32, "key"])
def test_one_key_that_is_not_in_a_list_is_refused_as_such(keys):
    with pytest.raises(ConfigurationError, match=r"must be a list of keys; write \[key\]"):
        Signer(keys)


def test_a_signature_that_is_no_valid_text_is_refused_like_any_other():
    with pytest.raises(ContentRefused, match="does not match"):
        Signer([OLD]).verify([b"a"], "\udcff")


@pytest.mark.parametrize("keys", [b"k" * 32, "key", [b"short"], ["k" * 32], [b"k" * 32, None]])
def test_bad_keys_are_refused_without_being_shown(keys):
    with pytest.raises(ConfigurationError) as caught:
        Signer(keys)
    assert "kkk" not in str(caught.value)
    assert "short'" not in str(caught.value)


@pytest.mark.parametrize(("size", "fits"), [(15, False), (16, True), (17, True)])
def test_a_key_has_at_least_16_bytes(size, fits):
    key = bytes(range(size))
    if not fits:
        with pytest.raises(ConfigurationError, match="signing key 2 must be bytes, at least 16"):
            Signer([OLD, key])
        return
    signer = Signer([key])
    signer.verify([b"a"], signer.sign([b"a"]))
    envelope = Codec(signing_keys=[key]).to_envelope(MESSAGE)
    assert Codec(signing_keys=[key]).from_envelope(envelope, "pay") == MESSAGE


def test_a_signer_without_keys_says_so():
    assert not Signer()
    assert Signer([OLD])
    with pytest.raises(ContentRefused):
        Signer().verify([b"a"], Signer([OLD]).sign([b"a"]))


@pytest.mark.parametrize("signing", [OLD, NEW, OTHER, b"f" * 32])
def test_every_key_is_compared_whichever_matches(monkeypatch, signing):
    """The time that it takes says nothing of which key it was, or of how much of it was right."""
    compared = []
    compare = hmac.compare_digest

    def note(one, other):
        compared.append((one, other))
        return compare(one, other)

    monkeypatch.setattr(hmac, "compare_digest", note)
    signature = Signer([signing]).sign([b"a"])
    try:
        Signer([OLD, NEW, OTHER]).verify([b"a"], signature)
    except ContentRefused:
        assert signing == b"f" * 32
    expected = [Signer([key]).sign([b"a"]).encode() for key in (OLD, NEW, OTHER)]
    assert compared == [(each, signature.encode()) for each in expected]


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
        ("aztask-signature-2", "2:1:1:" + SCHEME + "0" * 64),
        ("aztask-signature-2", "ünïcödé"),
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
        envelope,
        headers={
            **envelope.headers,
            "aztask-signature": signature,
            "aztask-signature-2": signature,
        },
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
