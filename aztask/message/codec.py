"""The codec: a message into an envelope and back, arguments into bytes and back.

Rules
1. Order of reading: sizes, signature, headers; the body stays bytes. Only `Codec.decode_arguments`
   reads it, after `aztask.message.bounds` has checked the bytes.
2. Two formats exist, msgpack and json, both through Kombu's registry. Pickle and yaml are never
   read or written, whatever is configured: decoding them can run code.
3. Whatever bytes and headers come in, the only error is a CodecError with one line that says what
   is wrong. Whatever an encoder writes, a decoder with the same limits can read.
4. With encryption, an envelope's body and checkpoint are encrypted for its task, and for the place
   in which it is stored. A message whose key is missing is read as it is: it can be put off and
   replayed, and `Codec.locked` says what is missing. It is no damage that another program has keys.
"""

from __future__ import annotations

from binascii import Error as Base64Error
from binascii import a2b_base64
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, NoReturn

from kombu import serialization
from kombu.exceptions import KombuError

from aztask.errors import (
    CodecError,
    ContentRefused,
    DecodeError,
    EncodeError,
    KeyMissing,
)
from aztask.message import jsonencoding
from aztask.message import serializer as formats
from aztask.message.bounds import MessageLimits, check_json, check_msgpack, check_size
from aztask.message.compression import decompress
from aztask.message.encryption import (
    NO_CIPHER,
    PLAIN_DIGESTS,
    Cipher,
    KeyDigests,
    Locked,
    is_encrypted,
)
from aztask.message.envelope import NO_PROPERTIES, Envelope
from aztask.message.foreign import checked_content_type, content_type_of
from aztask.message.headers import (
    COMPRESSION,
    SAVED,
    STORED_ONLY,
    check_outgoing,
    read_headers,
    read_text,
    write_headers,
)
from aztask.message.jsonencoding import check_json_values
from aztask.message.message import MESSAGE_DEFAULTS, MESSAGE_ID_LIMIT, TaskMessage, build
from aztask.message.payload import (
    MARK,
    PAYLOAD_BYTES,
    StoredValue,
    checked_reference,
    inner_type,
    wrapped_type,
)
from aztask.message.signatures import SignatureRules, Signatures, check_key
from aztask.support.display import one_line
from aztask.support.keyed import KeyedDigest

# -- The keywords that the body of a message may hold.


def check_keywords(kwargs: Mapping[Any, Any], error: type[CodecError]) -> None:
    """Raise `error` for keywords that no call can have."""
    for name in kwargs:
        if not isinstance(name, str):
            raise error(f"a keyword must be text, not {type(name).__name__}")
    if "self" in kwargs:
        raise error("a keyword argument cannot be called self; rename the task's parameter")


_ARGUMENTS = "arguments"
_CHECKPOINT = "checkpoint"
_NOT_ASCII = bytes(range(0x80))
_CHECKS: dict[str, Callable[[bytes, MessageLimits], None]] = {
    formats.MSGPACK: check_msgpack,
    formats.JSON: check_json,
}


class Codec:
    """Encodes and decodes messages with one serializer, accept list, set of limits and keys.

    Immutable: any number of threads may share one.
    """

    def __init__(
        self,
        *,
        serializer: str = "msgpack",
        accept: Sequence[str] = ("msgpack", "json"),
        limits: MessageLimits = MessageLimits(),
        signing_keys: Sequence[bytes] = (),
        signatures: SignatureRules = SignatureRules(),
        id_key: bytes | None = None,
        argsrepr: bool = False,
        load: Callable[[StoredValue], bytes] | None = None,
        cipher: Cipher = NO_CIPHER,
    ) -> None:
        """Raises ConfigurationError.

        * `serializer`: the format to write, "msgpack" or "json".
        * `accept`: the formats to read.
        * `limits`: what a message may contain.
        * `signing_keys`: see `aztask.message.signatures`; with one or more, unsigned messages are
          refused.
        * `signatures`: when a signature is accepted.
        * `id_key`: makes message ids that strangers cannot guess. At least 16 bytes.
        * `argsrepr`: True to write the headers ``argsrepr`` and ``kwargsrepr``.
        * `load`: fetches a payload; None if the app stores none.
        * `cipher`: encrypts what is in envelopes, and decrypts it.
        """
        self.cipher = cipher
        self._encrypts = cipher.encrypts
        self.serializer = serializer
        self.content_type = content_type_of(serializer)
        self.accept = frozenset(content_type_of(name) for name in accept)
        self.limits = limits
        self.argsrepr = argsrepr
        self.load = load
        self._large = limits if load is None else replace(limits, body_bytes=PAYLOAD_BYTES)
        self._signatures = Signatures(signing_keys, signatures)
        if id_key is not None:
            check_key(id_key, "the id key")
        self._id_key = None if id_key is None else KeyedDigest(id_key)
        self.digests = KeyDigests(id_key or b"") if cipher.encrypts else PLAIN_DIGESTS
        register_msgpack()

    @property
    def signs(self) -> bool:
        """True if messages are signed."""
        return bool(self._signatures)

    @property
    def takes_old(self) -> bool:
        """True if signatures are verified, and those of a release before 0.2 are accepted."""
        return self._signatures.old

    @property
    def customized(self) -> bool:
        """True if messages differ from those of a codec without keys and ``argsrepr``."""
        return self.signs or self._id_key is not None or self.argsrepr or self._encrypts

    @property
    def encrypts(self) -> bool:
        """True if messages are encrypted."""
        return self._encrypts

    # -- arguments ---------------------------------------------------------------------------

    def encode_arguments(
        self, args: Sequence[Any], kwargs: Mapping[str, Any], *, large: bool = False
    ) -> tuple[bytes, str, str]:
        """``(body, content_type, content_encoding)`` of ``[args, kwargs, {}]``.

        * `large`: True if a large body will be stored as a payload.

        Raises EncodeError (a value without an encoding, a keyword that is not text or is ``self``)
        and ContentRefused (more than the limits allow).
        """
        if not isinstance(args, list | tuple):
            raise EncodeError(f"args must be a list or a tuple, not {type(args).__name__}")
        if not isinstance(kwargs, dict):
            raise EncodeError(f"kwargs must be a dict, not {type(kwargs).__name__}")
        if kwargs:
            check_keywords(kwargs, EncodeError)
        limits = self._large if large else self.limits
        content_type, encoding, body = self._dumps([args, kwargs, {}], "the arguments", limits)
        return body, content_type, encoding

    def decode_arguments(self, message: TaskMessage) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """``(args, kwargs)`` from the message's body.

        Raises DecodeError (damaged) and ContentRefused (a format or a size that is not accepted).
        Needs at most about 80 bytes of memory per value, plus the body.
        """
        if message.payload is not None and not is_encrypted(message.body):
            stored = StoredValue.parse(message.payload)
            raise ContentRefused(f"the arguments are stored apart, {stored.described}")
        args, kwargs, _ = self._decode_parts(message)
        if not isinstance(args, list):
            raise DecodeError(f"args must be a list, not {type(args).__name__}")
        if not isinstance(kwargs, dict):
            raise DecodeError(f"kwargs must be a map, not {type(kwargs).__name__}")
        check_keywords(kwargs, DecodeError)
        return tuple(args), kwargs

    def decode_embed(self, message: TaskMessage) -> dict[str, Any]:
        """The third part of the body: what follows the task, as Celery embeds it.

        Raises what `decode_arguments` raises.
        """
        return self._decode_parts(message)[2]

    def encode_embedding(
        self,
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
        embed: Mapping[str, Any],
        content_type: str,
    ) -> tuple[bytes, str, str]:
        """`encode_arguments` with a third part that is not empty, in a format of the caller.

        Raises what `encode_arguments` raises.
        """
        writer = self if content_type == self.content_type else self._in_other_format()
        check_keywords(kwargs, EncodeError)
        parts = [list(args), dict(kwargs), dict(embed)]
        written, encoding, body = writer._dumps(parts, "the arguments", self.limits)
        return body, written, encoding

    def _in_other_format(self) -> Codec:
        other = "json" if self.serializer == "msgpack" else "msgpack"
        return Codec(serializer=other, accept=(other,), limits=self.limits)

    def _decode_parts(self, message: TaskMessage) -> tuple[Any, Any, dict[str, Any]]:
        if is_encrypted(message.body):
            raise KeyMissing(f"the arguments: {self.locked(message)}")
        content_type = checked_content_type(
            message.content_type, message.content_encoding, self.accept
        )
        value = self.decode_body(message.body, content_type, "the arguments", self._large)
        if not isinstance(value, list) or len(value) != 3:
            raise DecodeError("the body is not a list [args, kwargs, embed] of message protocol 2")
        args, kwargs, embed = value
        if embed is not None and not isinstance(embed, dict):
            raise DecodeError(f"embed must be a map, not {type(embed).__name__}")
        return args, kwargs, embed or {}

    # -- values ------------------------------------------------------------------------------

    def encode_value(self, value: Any, *, large: bool = False) -> bytes:
        """Encode a result or a checkpoint, always as msgpack. Raises EncodeError.

        * `large`: as in `encode_arguments`.
        """
        return self._packed(value, "the value", self._large if large else self.limits)

    def decode_value(self, data: bytes) -> Any:
        """Decode a value that `encode_value` wrote; one that is stored apart is fetched.

        Raises DecodeError, ContentRefused, and what fetching raises
        (`aztask.stores.payloads.store`).
        """
        if not isinstance(data, bytes):
            raise DecodeError(f"an encoded value is bytes, not {type(data).__name__}")
        if is_encrypted(data):
            raise KeyMissing(f"the value: {self.cipher.not_now(data)}")
        value = self.decode_body(data, formats.MSGPACK, "the value")
        return self.resolved(value) if MARK in data else value

    def resolved(self, value: Any) -> Any:
        """Fetch and decode what is stored apart: the value itself, or elements of a list.

        Raises what `decode_value` raises.
        """
        if type(value) is list:
            return [self.resolved(each) if type(each) is StoredValue else each for each in value]
        if type(value) is not StoredValue:
            return value
        stored = value
        if self.load is None:
            raise ContentRefused(
                f"the value is stored apart, {stored.described}, and this app has no store for it:"
                " give the App the same payloads=... as the worker"
            )
        return self.decode_body(self.load(stored), formats.MSGPACK, "the value", self._large)

    def decode_body(
        self,
        data: bytes,
        content_type: str,
        what: str = "the body",
        limits: MessageLimits | None = None,
    ) -> Any:
        """The value in `data`, checked first. Raises DecodeError, ContentRefused for `what`.

        * `limits`: None, the default, means those of the codec.
        """
        limits = limits or self.limits
        if content_type not in _CHECKS:
            raise ContentRefused(
                f"content type {one_line(repr(content_type), 60)} is not read here"
            )
        check_size(len(data), limits)
        _CHECKS[content_type](data, limits)
        if content_type == formats.JSON:
            check_json_values(data, DecodeError, what)
        try:
            return serialization.loads(data, content_type, "binary", accept={content_type})
        except KombuError as error:
            raise DecodeError(f"{what} cannot be read: {_reason(error)}") from None

    # -- messages ----------------------------------------------------------------------------

    def to_envelope(
        self, message: TaskMessage, *, delay: float = 0.0, stored: str = ""
    ) -> Envelope:
        """`message` ready for a broker, to be received `delay` seconds after the send.

        * `stored`: the place in a result store where it waits to be sent; with keys, no queue then
          accepts it (`aztask.message.signatures`, rule 5).

        Raises EncodeError for an id, a name or a time that no reader would accept, and
        ContentRefused for arguments that are too large once they are encrypted.
        """
        check_outgoing(message, self.limits)
        try:
            headers = write_headers(message)
        except ValueError as error:
            raise EncodeError(f"the eta or expiry cannot be written: {error}") from None
        body = self._encrypted(message, headers, stored) if self._encrypts else message.body
        envelope = build(
            Envelope,
            {
                "body": body,
                "headers": headers,
                "message_id": (
                    message.message_id if self._id_key is None else self.message_id(message)
                ),
                "content_type": (
                    message.content_type
                    if message.payload is None
                    else wrapped_type(message.content_type)
                ),
                "content_encoding": message.content_encoding,
                "subject": message.task,
                "correlation_id": message.correlation_id or message.id,
                "session": message.session,
                "partition_key": None,
                "delay": delay,
                "expires_at": message.expires,
                "properties": {"reply_to": message.reply_to} if message.reply_to else NO_PROPERTIES,
                "problem": "",
            },
        )
        if not self._signatures:
            return envelope
        try:
            return self._signatures.signed(envelope, message.queue, stored)
        except DecodeError as error:
            raise EncodeError(str(error)) from None

    def message_id(self, message: TaskMessage) -> str:
        """The message id under which `message` is sent.

        Without an id key it is `TaskMessage.message_id`, with one a keyed hash of that.
        """
        return self.keyed_id(message.message_id)

    def keyed_id(self, message_id: str) -> str:
        """``keyed-`` and 64 hexadecimal digits; without an id key, `message_id` itself.

        The digits are the HMAC-SHA256 of ``aztask-id:1`` and `message_id`. Equal ids stay equal, so
        duplicate detection works as before, but only owners of the key can tell the id of a clone
        that is still to come.
        """
        if self._id_key is None:
            return message_id
        data = b"aztask-id:1" + message_id.encode("utf-8", "surrogatepass")
        return "keyed-" + self._id_key.digest(data).hex()

    def from_envelope(
        self, envelope: Envelope, queue: str, *, any_age: bool = False, stored: str = ""
    ) -> TaskMessage:
        """The message in `envelope`, received from `queue`; its body is not decoded.

        * `any_age`: accept a signature of any age, for messages that were set aside: dead letters
          and deferred messages.
        * `stored`: the place in a result store where it was found, as `to_envelope` got it.

        Celery's protocol 2 is read too, with Kombu's base64 or compressed bodies. Raises
        ContentRefused (signature, size, content type) and DecodeError (headers, changed after the
        encryption); and BrokerUnavailable for a stored message whose key is missing: another
        program, or this one when it has the key, goes on with it.
        """
        body, headers, problem = envelope.body, envelope.headers, envelope.problem
        if problem or not isinstance(body, bytes) or not isinstance(headers, Mapping):
            raise DecodeError(problem or "an envelope is a body of bytes and a map of headers")
        if self._signatures:
            any_age = any_age or bool(stored)
            self._signatures.verify(envelope, queue, self.limits, any_age=any_age, stored=stored)
        return self._read(envelope, queue, stored)

    def from_unsigned(self, envelope: Envelope, queue: str, *, stored: str = "") -> TaskMessage:
        """The message in an envelope that no key has signed, because the caller vouches for it.

        * `stored`: as in `from_envelope`.

        Raises what `from_envelope` raises, apart from a refusal of the signature.
        """
        if envelope.problem or not isinstance(envelope.body, bytes):
            raise DecodeError(envelope.problem or "an envelope is a body of bytes")
        return self._read(envelope, queue, stored)

    def age_at(self, envelope: Envelope, queue: str, now: float) -> str:
        """Why a verified message was too old at a time; see `Signatures.age_at`."""
        return self._signatures.age_at(envelope, queue, now)

    def _read(self, envelope: Envelope, queue: str, stored: str = "") -> TaskMessage:
        """The message in an envelope whose signature was verified, if there are keys."""
        body, headers = envelope.body, envelope.headers
        check_size(len(body), self.limits)
        content_type = checked_content_type(
            envelope.content_type, envelope.content_encoding, self.accept
        )
        values = read_headers(headers, self.limits)
        if not stored and "extra" in values and not STORED_ONLY.isdisjoint(values["extra"]):
            raise ContentRefused(
                "the message was made to be stored, and not to be sent: another program has sent"
                " what waits in the result store for its turn"
            )
        body = self._plain_body(envelope)
        if is_encrypted(body) or is_encrypted(values.get("saved")):
            body = self._decrypted(body, values, stored)
        if (inner := inner_type(content_type)) is not None or "payload" in values:
            content_type = checked_reference(inner, b"" if is_encrypted(body) else body, values)
        return build(
            TaskMessage,
            {
                **MESSAGE_DEFAULTS,
                "queue": queue,
                "body": body,
                "content_type": content_type,
                "content_encoding": envelope.content_encoding,
                **_properties(envelope, values["id"]),
                **values,
            },
        )

    # -- encryption --------------------------------------------------------------------------

    def locked(self, message: TaskMessage) -> str:
        """Why a message that was read is still encrypted, on one line; "" if it is not.

        It is sent on as it is, so that a program with its key runs it.
        """
        body, saved = message.body, message.saved
        if is_encrypted(body):
            return self.cipher.not_now(body)
        return self.cipher.not_now(saved) if is_encrypted(saved) else ""

    def _encrypted(self, message: TaskMessage, headers: dict[str, Any], stored: str) -> bytes:
        """The body as it travels, and the checkpoint in the headers.

        The body of a message whose arguments are stored apart is empty, and encrypted all the same:
        so a reader without the key knows that before it fetches them.
        """
        if stored and self.locked(message):
            raise EncodeError(f"the message cannot be stored: {self.locked(message)}")
        if message.saved is not None:
            headers[SAVED] = self.cipher.encrypt(message.saved, _CHECKPOINT, message.id, stored)
        body = self.cipher.encrypt(message.body, _ARGUMENTS, message.id, stored)
        check_size(len(body), self.limits)
        return body

    def _decrypted(self, body: bytes, values: dict[str, Any], stored: str) -> bytes:
        """The body in clear, and the checkpoint in `values`; both as they are without a key."""
        saved = values.get("saved")
        try:
            opened = self.cipher.decrypt(body, _ARGUMENTS, values["id"], stored)
            if saved is not None:
                values["saved"] = self.cipher.decrypt(saved, _CHECKPOINT, values["id"], stored)
            return opened
        except (KeyMissing, Locked) as error:
            if stored:
                raise Locked(f"what is stored for {stored} waits: {error}") from None
            return body
        except DecodeError as error:
            raise DecodeError(f"the arguments: {error}") from None

    # -- inside ------------------------------------------------------------------------------

    def _dumps(self, value: Any, what: str, limits: MessageLimits) -> tuple[str, str, bytes]:
        if self.content_type == formats.MSGPACK:
            # the function that Kombu's registry would call, called directly for speed
            return formats.MSGPACK, "binary", self._packed(value, what, limits)
        try:
            body = jsonencoding.dumps(value)
        except Exception as error:  # noqa: BLE001  # a value's own __json__ may raise anything
            reason = formats.explain_refusal(value)
            _not_encodable(what, self.serializer, TypeError(reason) if reason else error)
        check_json_values(body, EncodeError, what)
        self.check_written(body, formats.JSON, limits)
        return formats.JSON, "utf-8", body

    def _packed(self, value: Any, what: str, limits: MessageLimits) -> bytes:
        try:
            data = formats.pack(value)
        except (TypeError, ValueError, OverflowError, RecursionError) as error:
            _not_encodable(what, "msgpack", error)
        self.check_written(data, formats.MSGPACK, limits)
        try:
            formats.check_keys(data)
        except TypeError as error:
            _not_encodable(what, "msgpack", error)
        return data

    def check_written(
        self, body: bytes, content_type: str, limits: MessageLimits | None = None
    ) -> None:
        """Refuse a body now that a reader with the same limits would refuse later (rule 3)."""
        size, limits = len(body), limits or self.limits
        # A body of n bytes holds at most n values, and a list or map starts with a byte >= 0x80.
        if (
            size <= min(limits.items, limits.body_bytes)
            and content_type == formats.MSGPACK
            and (size < limits.depth or len(body.translate(None, _NOT_ASCII)) < limits.depth)
        ):
            return
        check_size(size, limits)
        _CHECKS[content_type](body, limits)

    def _plain_body(self, envelope: Envelope) -> bytes:
        """The body without the encodings that Kombu's producers add: base64, then compression."""
        body = envelope.body
        encoding = envelope.properties.get("body_encoding")
        if isinstance(encoding, str) and encoding.lower() == "base64":
            try:
                body = a2b_base64(body, strict_mode=True)
            except Base64Error as error:
                raise DecodeError(f"the body is not base64, as it claims: {error}") from None
        compression = envelope.headers.get(COMPRESSION)
        return decompress(body, compression, self.limits) if compression else body


def register_msgpack() -> None:
    """Register `aztask.message.serializer` as Kombu's ``msgpack``; idempotent."""
    serialization.register("msgpack", formats.pack, formats.unpack, formats.MSGPACK, "binary")


def _properties(envelope: Envelope, task_id: str) -> dict[str, Any]:
    """The message fields that travel as properties of the envelope."""
    found: dict[str, Any] = {}
    correlation_id = envelope.correlation_id
    if correlation_id is not None and correlation_id != task_id:
        found["correlation_id"] = read_text("correlation_id", correlation_id)
    if envelope.session is not None:
        found["session"] = read_text("session", envelope.session, MESSAGE_ID_LIMIT)
    reply_to = envelope.properties.get("reply_to")
    if reply_to:
        found["reply_to"] = read_text("reply_to", reply_to)
    return found


def _not_encodable(what: str, serializer: str, error: BaseException) -> NoReturn:
    raise EncodeError(f"{what} cannot be written as {serializer}: {_reason(error)}") from None


def _reason(error: BaseException) -> str:
    return one_line(str(error) or type(error).__name__, 200)
