"""The cipher, and messages that are encrypted: round trips, moved pieces, missing keys."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from hashlib import sha256
from typing import Any

import pytest

from aztask import App
from aztask.errors import (
    BrokerUnavailable,
    ConfigurationError,
    ContentRefused,
    DecodeError,
    EncodeError,
    KeyMissing,
)
from aztask.message.bounds import MessageLimits
from aztask.message.codec import Codec
from aztask.message.encryption import (
    ADDED_BYTES,
    HIDDEN,
    MARKER,
    NO_CIPHER,
    Cipher,
    KeyDigests,
    is_encrypted,
)
from aztask.message.message import TaskMessage
from aztask.message.payload import StoredValue, names_in
from aztask.message.signatures import SignatureRules
from aztask.message.template import Template

OLD, NEW = b"the-old-key-with-enough-bytes-in-it-0123", b"the-new-key-with-enough-bytes-in-it-4567"
SIGNING = b"a-signing-key-that-is-long-enough-0123456789"
SECRET = "4111-1111-1111-1111"
FROZEN = SignatureRules(now=lambda: 1_800_000_000.0)


def codec_of(*keys: bytes, encrypt: bool = True, environment: str = "", **options: Any) -> Codec:
    cipher = Cipher(keys, encrypt=encrypt, environment=environment)
    return Codec(
        cipher=cipher,
        signing_keys=[SIGNING],
        signatures=replace(FROZEN, environment=environment),
        **options,
    )


def message_of(codec: Codec, **fields: Any) -> TaskMessage:
    body, content_type, encoding = codec.encode_arguments([SECRET], {"cents": 5})
    made = TaskMessage("id-1", "shop.charge", "default", body, content_type, encoding)
    return replace(made, **fields)


# -- the cipher ------------------------------------------------------------------------------


def test_what_is_encrypted_is_read_with_the_key_and_its_identity_alone() -> None:
    cipher = Cipher([OLD], encrypt=True)
    sealed = cipher.encrypt(b"secret", "arguments", "id-1")
    assert is_encrypted(sealed)
    assert b"secret" not in sealed
    assert len(sealed) == len(b"secret") + ADDED_BYTES
    assert cipher.decrypt(sealed, "arguments", "id-1") == b"secret"
    for identity in (("arguments", "id-2"), ("result", "id-1"), ("arguments",), ("argumentsid-1",)):
        with pytest.raises(DecodeError, match="cannot be decrypted"):
            cipher.decrypt(sealed, *identity)
    with pytest.raises(DecodeError, match="another message, row or environment"):
        Cipher([OLD], environment="staging").decrypt(sealed, "arguments", "id-1")


def test_each_byte_counts() -> None:
    cipher = Cipher([OLD], encrypt=True)
    sealed = cipher.encrypt(b"secret", "x")
    for at in range(len(sealed)):
        changed = sealed[:at] + bytes([sealed[at] ^ 1]) + sealed[at + 1 :]
        if at < len(MARKER):
            assert cipher.decrypt(changed, "x") == changed, "it is no longer an encrypted piece"
        else:
            with pytest.raises((DecodeError, KeyMissing)):
                cipher.decrypt(changed, "x")
    for length in range(len(MARKER), len(sealed)):
        with pytest.raises((DecodeError, KeyMissing)):
            cipher.decrypt(sealed[:length], "x")


def test_each_piece_has_a_key_of_its_own() -> None:
    cipher = Cipher([OLD], encrypt=True)
    pieces = {cipher.encrypt(b"the same", "x") for _ in range(1000)}
    assert len(pieces) == 1000
    assert len({piece[len(MARKER) + 8 :][:16] for piece in pieces}) == 1000


def test_the_key_of_a_piece_is_that_of_rfc_5869() -> None:
    hashes = pytest.importorskip("cryptography.hazmat.primitives.hashes")
    kdf = pytest.importorskip("cryptography.hazmat.primitives.kdf.hkdf")
    aead = pytest.importorskip("cryptography.hazmat.primitives.ciphers.aead")
    cipher = Cipher([OLD], encrypt=True)
    sealed = cipher.encrypt(b"secret")
    salt = sealed[len(MARKER) + 8 :][:16]
    own = kdf.HKDF(hashes.SHA256(), 32, b"aztask-encryption", salt).derive(OLD)
    head = ADDED_BYTES - 16
    bound = sealed[:head] + b"\x91\xa0"
    assert aead.AESGCM(own).decrypt(bytes(12), sealed[head:], bound) == b"secret"


def test_the_first_key_encrypts_and_each_one_decrypts() -> None:
    before = Cipher([OLD], encrypt=True).encrypt(b"secret", "x")
    added, moved, done = Cipher([OLD, NEW]), Cipher([NEW, OLD], encrypt=True), Cipher([NEW])
    assert added.decrypt(before, "x") == moved.decrypt(before, "x") == b"secret"
    after = moved.encrypt(b"secret", "x")
    assert added.decrypt(after, "x") == done.decrypt(after, "x") == b"secret"
    with pytest.raises(KeyMissing, match=f"with the key {before[4:12].hex()}.*has other keys"):
        done.decrypt(before, "x")
    with pytest.raises(KeyMissing, match="has no encryption keys: add the key to encryption_keys"):
        NO_CIPHER.decrypt(before, "x")
    assert moved.names() == [after[4:12].hex(), before[4:12].hex()]


def test_no_text_shows_a_key() -> None:
    cipher = Cipher([OLD, NEW], encrypt=True)
    sealed = cipher.encrypt(b"secret", "x")
    shown = repr(cipher) + NO_CIPHER.missing(sealed) + "".join(cipher.names())
    for key in (OLD, NEW):
        assert key.decode() not in shown
        assert sha256(key).hexdigest()[:16] not in shown


@pytest.mark.parametrize("data", [b"", b"\x93", b"[[], {}, {}]", b"\xc1", b"\xc1AZ\x03"])
def test_what_is_not_encrypted_is_returned_as_it_is(data: bytes) -> None:
    assert Cipher([OLD], encrypt=True).decrypt(data, "x") == data


def test_references_to_payloads_stay_readable_and_cannot_be_changed() -> None:
    names = [f"arguments/0000000123/{digit * 32}" for digit in "ab"]
    data = b"9".join(str(StoredValue.of(name, b"x")).encode() for name in names)
    data = b"aztask-stored:" + data + b" and a secret"
    cipher = Cipher([OLD], encrypt=True)
    sealed = cipher.encrypt(data, "x")
    assert list(names_in(sealed)) == list(names_in(data)) == names
    assert b"secret" not in sealed
    assert cipher.decrypt(sealed, "x") == data
    with pytest.raises(DecodeError):
        cipher.decrypt(sealed.replace(b"a" * 32, b"c" * 32), "x")


@pytest.mark.parametrize("keys", [[b"short"], ["text" * 20], [OLD, b""]])
def test_a_wrong_key_is_refused(keys: list[Any]) -> None:
    with pytest.raises(ConfigurationError, match=r"encryption key . must have at least 32 bytes"):
        Cipher(keys)


def test_cryptography_is_imported_with_the_first_key_alone() -> None:
    code = (
        "import sys\nfrom aztask import App\nApp('shop', broker='local://:memory:').codec\n"
        "print('cryptography' in sys.modules)\n"
        "from aztask.message.encryption import Cipher\nCipher([b'k' * 32])\n"
        "print('cryptography' in sys.modules)\n"
    )
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert ran.stdout.split() == ["False", "True"]


def test_without_cryptography_the_error_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "cryptography.hazmat.primitives.ciphers.aead", None)
    with pytest.raises(ConfigurationError, match=r'pip install "aztask\[crypto\]"'):
        Cipher([OLD])


def test_digests_are_keyed_with_encryption_alone() -> None:
    plain, keyed = KeyDigests(), KeyDigests(b"an-id-key-0123456789")
    assert plain.of(b"acme") == sha256(b"acme").hexdigest()[:40]
    assert plain.hidden("acme") == "acme"
    assert keyed.of(b"acme") != plain.of(b"acme")
    assert keyed.hidden("acme") == HIDDEN + keyed.of(b"acme")
    assert keyed.hidden("") == "", "one limit for all"
    assert keyed.of(b"acme") != KeyDigests(b"another-id-key-0123").of(b"acme")


# -- a team's own codec ----------------------------------------------------------------------


class Reversing:
    """Reverses the data behind a digest of what it is bound to; `trouble` is raised instead."""

    name = "acme.reversing_2"
    trouble: Exception | None = None
    answer: Any = None

    def encode(self, data: bytes, bound: bytes) -> bytes:
        if self.trouble is not None:
            raise self.trouble
        return sha256(bound).digest() + data[::-1] if self.answer is None else self.answer

    def decode(self, data: bytes, bound: bytes) -> bytes:
        if self.trouble is not None:
            raise self.trouble
        if data[:32] != sha256(bound).digest():
            raise ValueError(SECRET)
        return data[32:][::-1] if self.answer is None else self.answer


def coding(codec: Any = None, **options: Any) -> Codec:
    cipher = Cipher(encrypt=True, codec=codec or Reversing())
    return Codec(cipher=cipher, signing_keys=[SIGNING], signatures=FROZEN, **options)


def test_a_codec_encodes_for_one_place_alone() -> None:
    cipher = Cipher(encrypt=True, environment="live", codec=Reversing())
    coded = cipher.encrypt(b"secret", "arguments", "id-1")
    assert is_encrypted(coded)
    assert b"acme.reversing_2" in coded
    assert b"secret" not in coded
    assert cipher.encrypt(coded, "other") == coded
    assert cipher.decrypt(coded, "arguments", "id-1") == b"secret"
    elsewhere = Cipher(environment="staging", codec=Reversing())
    for reader, identity in ((cipher, "id-2"), (elsewhere, "id-1")):
        with pytest.raises(DecodeError, match=r"'acme.reversing_2' raised ValueError") as raised:
            reader.decrypt(coded, "arguments", identity)
        assert SECRET not in str(raised.value), "the text of its error is not shown"


def test_references_of_what_a_codec_encodes_stay_readable_and_bound() -> None:
    name = f"arguments/0000000123/{'a' * 32}"
    data = b"aztask-stored:" + str(StoredValue.of(name, b"x")).encode() + b" and a secret"
    cipher = Cipher(encrypt=True, codec=Reversing())
    coded = cipher.encrypt(data, "x")
    assert list(names_in(coded)) == [name]
    assert cipher.decrypt(coded, "x") == data
    with pytest.raises(DecodeError):
        cipher.decrypt(coded.replace(b"a" * 32, b"c" * 32), "x")


def test_a_codec_takes_the_place_of_keys_which_still_decrypt() -> None:
    before = Cipher([OLD], encrypt=True).encrypt(b"secret", "x")
    both = Cipher([OLD], encrypt=True, codec=Reversing())
    assert both.decrypt(before, "x") == b"secret"
    after = both.encrypt(b"secret", "x")
    assert Cipher(codec=Reversing()).decrypt(after, "x") == b"secret"
    with pytest.raises(KeyMissing):
        Cipher([OLD]).decrypt(after, "x")


def test_a_reader_is_told_which_codec_it_lacks() -> None:
    coded = Cipher(encrypt=True, codec=Reversing()).encrypt(b"secret", "x")
    other = Reversing()
    other.name = "other"
    for reader, has in (
        (NO_CIPHER, "no content codec"),
        (Cipher(codec=other), "the codec 'other'"),
    ):
        with pytest.raises(
            KeyMissing, match=f"by the content codec 'acme.reversing_2', and this program has {has}"
        ):
            reader.decrypt(coded, "x")
    forged = coded[:4] + b"\x1b[2J\n\xff".ljust(24, b"\0") + coded[28:]
    assert NO_CIPHER.missing(forged).isascii()
    assert NO_CIPHER.missing(forged).isprintable()


def test_a_codec_that_cannot_decode_now_carries_the_message_on() -> None:
    sender, codec = coding(), Reversing()
    message = message_of(sender, saved=sender.encode_value(SECRET))
    envelope = sender.to_envelope(message)
    codec.trouble = KeyMissing("key 7 is not here")
    reader = coding(codec)
    read = reader.from_envelope(envelope, "default")
    assert "its content codec cannot decode it now" in reader.locked(read)
    again = reader.to_envelope(read.put_off(delivery_base=0))
    assert sender.from_envelope(again, "default").body == message.body
    stored = sender.to_envelope(message, stored="schedule id-1")
    with pytest.raises(BrokerUnavailable, match=r"schedule id-1 waits.*key 7 is not here"):
        reader.from_envelope(stored, "default", stored="schedule id-1")
    codec.trouble = None
    assert reader.from_envelope(envelope, "default") == message


@pytest.mark.parametrize(
    ("trouble", "answer", "error", "text"),
    [
        (BrokerUnavailable("KMS is away"), None, BrokerUnavailable, "KMS is away"),
        (ValueError(SECRET), None, EncodeError, "'acme.reversing_2' raised ValueError$"),
        (None, "text", EncodeError, "returned str, not bytes"),
        (None, b"x" * 2000, EncodeError, "made 2000 bytes of .*; 1024 more are allowed"),
    ],
)
def test_a_codec_that_fails_is_named(
    trouble: Exception | None, answer: Any, error: type[Exception], text: str
) -> None:
    codec = Reversing()
    codec.trouble, codec.answer = trouble, answer
    sender = coding(codec)
    with pytest.raises(error, match=text):
        sender.to_envelope(message_of(sender))


def test_a_codec_that_decodes_no_bytes_is_named() -> None:
    codec = Reversing()
    cipher = Cipher(encrypt=True, codec=codec)
    coded = cipher.encrypt(b"x", "x")
    codec.answer = None, "text"
    with pytest.raises(DecodeError, match="returned tuple, not bytes"):
        cipher.decrypt(coded, "x")


def test_an_app_has_a_codec_without_keys() -> None:
    options = {name: value for name, value in GOOD.items() if name != "encryption_keys"}
    codec = Reversing()
    app = App("shop", broker="local://:memory:", content_codec=codec, **options)

    @app.task
    def charge(card: str) -> None: ...

    charge.delay(SECRET)
    (found,) = app.broker.peek("default")
    assert b"acme.reversing_2" in found.envelope.body
    message = app.codec.from_envelope(found.envelope, "default")
    assert app.codec.decode_arguments(message) == ((SECRET,), {})


def test_room_is_left_for_what_a_codec_adds() -> None:
    assert Cipher([OLD]).added_bytes == 0
    assert Cipher([OLD], encrypt=True).added_bytes == ADDED_BYTES
    codec = Reversing()
    codec.answer = b"x" * 1024
    cipher = Cipher(encrypt=True, codec=codec)
    assert len(cipher.encrypt(b"", "x")) == cipher.added_bytes


@pytest.mark.parametrize("name", ["", "x" * 25, "two words", "-x", "naïve", b"x", None])
def test_the_name_of_a_codec_is_checked(name: Any) -> None:
    codec = Reversing()
    codec.name = name
    with pytest.raises(ConfigurationError, match="content_codec: its name is 1 to 24 letters"):
        App("shop", broker="local://:memory:", content_codec=codec)


@pytest.mark.parametrize("codec", [object(), Reversing, "fernet"])
def test_what_is_no_codec_is_refused(codec: Any) -> None:
    with pytest.raises(ConfigurationError, match="content_codec is an object with a name and the"):
        App("shop", broker="local://:memory:", content_codec=codec)


# -- messages --------------------------------------------------------------------------------


def test_arguments_and_a_checkpoint_are_encrypted_on_their_way() -> None:
    codec = codec_of(OLD)
    message = message_of(codec, saved=codec.encode_value({"card": SECRET}))
    envelope = codec.to_envelope(message)
    assert SECRET not in repr(envelope)
    assert is_encrypted(envelope.body)
    assert is_encrypted(envelope.headers["aztask-saved"])
    read = codec.from_envelope(envelope, "default")
    assert read == message
    assert codec.decode_arguments(read) == ((SECRET,), {"cents": 5})
    assert codec.locked(read) == ""


@pytest.mark.parametrize("serializer", ["msgpack", "json"])
def test_both_formats_are_encrypted(serializer: str) -> None:
    codec = codec_of(OLD, serializer=serializer)
    envelope = codec.to_envelope(message_of(codec))
    assert SECRET.encode() not in envelope.body
    read = codec.from_envelope(envelope, "default")
    assert codec.decode_arguments(read) == ((SECRET,), {"cents": 5})


def test_keys_alone_change_no_byte() -> None:
    plain = Codec(signing_keys=[SIGNING], signatures=FROZEN)
    ready = codec_of(OLD, encrypt=False)
    message = message_of(plain, saved=plain.encode_value(SECRET))
    assert ready.to_envelope(message) == plain.to_envelope(message)
    assert ready.from_envelope(plain.to_envelope(message), "default") == message
    assert not ready.encrypts
    assert ready.customized == plain.customized


def test_arguments_of_another_message_are_refused() -> None:
    cipher = Cipher([OLD], encrypt=True)
    codec = Codec(cipher=cipher)  # not signed: the encryption alone refuses it
    one, two = (codec.to_envelope(message_of(codec, id=name)) for name in ("id-1", "id-2"))
    with pytest.raises(DecodeError, match="the arguments: it cannot be decrypted"):
        codec.from_envelope(replace(one, body=two.body), "default")
    saved = message_of(codec, saved=codec.encode_value(1))
    envelope = codec.to_envelope(saved)
    headers = {**envelope.headers, "aztask-saved": envelope.body}
    with pytest.raises(DecodeError):
        codec.from_envelope(replace(envelope, headers=headers), "default")


def test_what_is_stored_is_not_what_is_sent() -> None:
    codec = Codec(cipher=Cipher([OLD], encrypt=True))
    message = message_of(codec)
    stored = codec.to_envelope(message, stored="schedule id-1")
    assert codec.from_envelope(stored, "default", stored="schedule id-1") == message
    for place in ("", "schedule id-2"):
        with pytest.raises(DecodeError):
            codec.from_envelope(stored, "default", stored=place)


def test_a_message_without_its_key_is_carried_on() -> None:
    sender, other, keyless = codec_of(NEW), codec_of(OLD), codec_of(encrypt=False)
    message = message_of(sender, saved=sender.encode_value(SECRET))
    envelope = sender.to_envelope(message)
    for codec in (other, keyless):
        read = codec.from_envelope(envelope, "default")
        assert (read.id, read.task) == ("id-1", "shop.charge")
        assert "is encrypted with the key" in codec.locked(read)
        with pytest.raises(KeyMissing, match="the arguments: it is encrypted with the key"):
            codec.decode_arguments(read)
        again = codec.to_envelope(read.put_off(delivery_base=0))
        found = sender.from_envelope(again, "default")
        assert (found.body, found.saved) == (message.body, message.saved)
        assert found.put_off_count == 1


def test_a_message_whose_arguments_are_stored_apart_says_which_key_it_needs() -> None:
    sender, keyless = codec_of(NEW), codec_of(encrypt=False)
    reference = str(StoredValue.of(f"arguments/0000000123/{'a' * 32}", b"x"))
    message = message_of(sender, body=b"", payload=reference)
    envelope = sender.to_envelope(message)
    assert sender.from_envelope(envelope, "default") == message
    read = keyless.from_envelope(envelope, "default")
    assert keyless.locked(read)
    assert read.payload == reference
    with pytest.raises(KeyMissing):
        keyless.decode_arguments(read)
    assert sender.from_envelope(keyless.to_envelope(read), "default") == message
    with pytest.raises(ContentRefused, match="stored apart"):
        sender.decode_arguments(message)


def test_what_is_stored_waits_for_its_key() -> None:
    sender, keyless = codec_of(NEW), codec_of(encrypt=False)
    envelope = sender.to_envelope(message_of(sender), stored="schedule id-1")
    with pytest.raises(BrokerUnavailable, match="what is stored for schedule id-1 waits"):
        keyless.from_envelope(envelope, "default", stored="schedule id-1")


def test_what_cannot_be_read_is_not_stored() -> None:
    sender, other = codec_of(NEW), codec_of(OLD)
    read = other.from_envelope(sender.to_envelope(message_of(sender)), "default")
    with pytest.raises(EncodeError, match="cannot be stored: it is encrypted with the key"):
        other.to_envelope(read, stored="schedule id-1")


def test_values_that_are_still_encrypted_name_their_key() -> None:
    sealed = Cipher([NEW], encrypt=True).encrypt(b"\xc0", "outcome")
    with pytest.raises(KeyMissing, match="the value: it is encrypted with the key"):
        Codec().decode_value(sealed)


def test_limits_hold_for_what_is_encrypted() -> None:
    codec = codec_of(OLD, limits=MessageLimits(body_bytes=2000))
    room = 2000 - ADDED_BYTES
    codec.from_envelope(codec.to_envelope(message_of(codec, body=b"x" * room)), "default")
    with pytest.raises(ContentRefused, match="2001"):
        codec.to_envelope(message_of(codec, body=b"x" * (room + 1)))


def test_many_invocations_are_encrypted_each_alone() -> None:
    codec = codec_of(OLD)
    template = Template(codec, "shop.charge", "default")
    rows = [(SECRET,), (SECRET,)]
    made = template.envelopes(["a", "b"], ["card"], rows)
    assert all(SECRET.encode() not in each.body for each in made)
    read = [codec.from_envelope(each, "default") for each in made]
    assert [codec.decode_arguments(each) for each in read] == [((), {"card": SECRET})] * 2


# -- the settings ----------------------------------------------------------------------------

GOOD: dict[str, Any] = {
    "encryption_keys": [OLD.decode()],
    "encrypt": True,
    "signing_keys": [SIGNING.decode()],
    "id_key": "an-id-key-0123456789",
}


@pytest.mark.parametrize(
    ("without", "text"),
    [
        ("encryption_keys", "encrypt=True needs encryption_keys"),
        ("signing_keys", "encrypt=True needs signing_keys, too"),
        ("id_key", "encrypt=True needs id_key, too"),
    ],
)
def test_what_encryption_needs_is_asked_for(without: str, text: str) -> None:
    options = {name: value for name, value in GOOD.items() if name != without}
    with pytest.raises(ConfigurationError, match=text) as raised:
        App("shop", broker="local://:memory:", **options)
    assert "\n" not in str(raised.value)


def test_arguments_as_text_do_not_go_with_encryption() -> None:
    with pytest.raises(ConfigurationError, match="argsrepr=True writes the arguments as text"):
        App("shop", broker="local://:memory:", argsrepr=True, **GOOD)


def test_a_short_key_is_refused_and_not_shown() -> None:
    with pytest.raises(ConfigurationError, match="encryption key 1 is shorter than 32") as raised:
        App("shop", broker="local://:memory:", encryption_keys=["too-short-to-be-safe"])
    assert "too-short" not in str(raised.value)


@pytest.fixture
def variables(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    def set_them(**values: str) -> None:
        for name, value in values.items():
            monkeypatch.setenv(name, value)

    return set_them


def test_keys_come_from_the_environment(variables: Callable[..., None]) -> None:
    variables(
        AZTASK_ENCRYPTION_KEYS=f"{NEW.decode()}\n{OLD.decode()}\n",
        AZTASK_ENCRYPT="1",
        AZTASK_SIGNING_KEYS=SIGNING.decode(),
        AZTASK_ID_KEY="an-id-key-0123456789",
    )
    app = App("shop", broker="local://:memory:")
    assert app.codec.encrypts
    assert app.codec.cipher.names() == Cipher([NEW, OLD]).names()
    assert NEW.decode() not in repr(app.settings)


@pytest.mark.parametrize("text", ["yes", "true", ""])
def test_the_switch_is_1_or_0(variables: Callable[..., None], text: str) -> None:
    variables(AZTASK_ENCRYPT=text or " ")
    with pytest.raises(ConfigurationError, match="AZTASK_ENCRYPT is 1 or 0"):
        App("shop", broker="local://:memory:")


def test_an_empty_variable_of_keys_switches_nothing_off(variables: Callable[..., None]) -> None:
    variables(AZTASK_ENCRYPTION_KEYS=" ")
    with pytest.raises(ConfigurationError, match="AZTASK_ENCRYPTION_KEYS or its file holds no key"):
        App("shop", broker="local://:memory:")
