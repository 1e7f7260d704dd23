"""Envelopes made in bulk equal those that the codec makes one by one."""

from datetime import UTC, datetime
from decimal import Decimal

import pytest

from aztask.errors import ContentRefused, EncodeError
from aztask.message.bounds import MessageLimits
from aztask.message.codec import Codec
from aztask.message.signatures import SignatureRules
from aztask.message.template import Template

KWARGS = {
    "path": "a/b.png",
    "width": 200,
    "at": datetime(2026, 1, 2, 3, 4, 5, 6, tzinfo=UTC),
    "price": Decimal("1.50"),
    "raw": b"\x00\xff",
    "tags": ["x", None, {"deep": [1.5, True]}],
}
FROZEN = SignatureRules(now=lambda: 1_800_000_000.0)
KEY = b"0123456789abcdef0123456789abcdef"


@pytest.mark.parametrize("kwargs", [KWARGS, {}, {"text": "x" * 5000}], ids=["many", "none", "long"])
@pytest.mark.parametrize(
    "options", [{}, {"delay": 5.0}, {"expires_at": 1_900_000_000.5}], ids=["plain", "delay", "end"]
)
@pytest.mark.parametrize("keys", [(), (KEY,)], ids=["unsigned", "signed"])
@pytest.mark.parametrize("id_key", [None, KEY], ids=["plain ids", "keyed ids"])
def test_an_envelope_equals_the_codec_s(kwargs, options, keys, id_key):
    codec = Codec(signing_keys=keys, signatures=FROZEN, id_key=id_key, argsrepr=id_key is not None)
    template = Template(codec, "shop.resize", "bulk", **options)
    message = template.message("id-1", kwargs)
    plain = codec.to_envelope(message, delay=options.get("delay", 0.0))
    assert template.envelope("id-1", kwargs) == plain
    assert template.envelopes(["id-1"], list(kwargs), [tuple(kwargs.values())]) == [plain]
    assert codec.from_envelope(plain, "bulk") == message
    assert codec.decode_arguments(message) == ((), kwargs)


def test_each_envelope_is_its_own():
    template = Template(Codec(argsrepr=True), "shop.resize", "bulk")
    first, second = template.envelope("a", {"n": 1}), template.envelope("b", {"n": 2})
    assert (first.message_id, first.headers["id"], first.correlation_id) == ("a:0:0", "a", "a")
    assert (second.message_id, second.headers["root_id"]) == ("b:0:0", "b")
    assert first.headers["kwargsrepr"] == "{'n': 1}"
    assert first.body != second.body


@pytest.mark.parametrize("kwargs", [{"self": 1}, {"x": object()}, {3: 4}])
def test_what_cannot_be_written_is_refused(kwargs):
    with pytest.raises(EncodeError):
        Template(Codec(), "shop.resize", "bulk").envelope("a", kwargs)


def test_what_one_of_many_cannot_write_is_not_passed_over():
    template = Template(Codec(limits=MessageLimits(body_bytes=2000)), "shop.resize", "bulk")
    rows = [("short",), ("x" * 3000,)]
    with pytest.raises(ContentRefused):
        template.envelopes(["a", "b"], ["text"], rows)
    with pytest.raises((EncodeError, TypeError)):
        template.envelopes(["a", "b"], ["text"], [("short",), (object(),)])
    with pytest.raises(EncodeError):
        template.envelopes(["a"], ["self"], [("short",)])
    with pytest.raises(TypeError, match="a tuple as a key"):
        template.envelopes(["a", "b"], ["text"], [("short",), ({(1, 2): 3},)])


def test_a_name_that_nobody_could_read_is_refused_at_once():
    with pytest.raises(EncodeError):
        Template(Codec(), "", "bulk")
