"""What the signature of a message covers, how it travels, and when it is accepted.

Rules
1. The signature, version 2, covers the body, the time of sending, the queue and everything that a
   worker or a task reads: all headers except those of `NOT_SIGNED`, the content type and encoding,
   the session, the correlation id and ``reply_to``. A header that is added, changed or removed on
   the way makes it wrong.
2. Version 1, of aztask 0.1, covers less. While `SignatureRules.old` is true both versions are
   written, and version 1 alone is accepted from senders that know no other. aztask 0.3 will neither
   write nor accept it.
3. An attacker cannot turn a message of both versions into one of version 1: its content type
   announces version 2 (`ANNOUNCED`), and version 1 covers the content type.
4. Headers are checked for size, count and depth before a signature is computed over them.
5. A message that waits in a result store, for its turn in a workflow or for its time, is signed for
   its place there, which its content type names (`STORED`). No queue accepts it: a program that
   reads results and may send cannot run a step before its turn. The worker whose turn it is
   verifies it, checks that it lies in its place, and signs it anew for the queue. Without that
   parameter a stored message is one of a release before 0.2, and accepted while
   `SignatureRules.old` is true. Such a release reads messages with the parameter, and drops it when
   it sends them.
6. An environment is part of every signature of version 2, and ends version 1.

A signature hides nothing. It does not stop an attacker from sending the same message again, either:
the recorded outcome of ``(id, generation, hop)`` does, as long as results are kept, and after that
`SignatureRules.max_age`.
"""

from __future__ import annotations

import hmac
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from hashlib import sha256
from typing import Any, Final

import msgpack

from aztask.errors import ConfigurationError, ContentRefused, DecodeError
from aztask.message.bounds import MessageLimits, check_size
from aztask.message.envelope import Envelope
from aztask.message.headers import SIGNATURE, SIGNATURE_2, check_before_signature
from aztask.message.message import changed
from aztask.support import clock
from aztask.support.keyed import KeyedDigest

# -- the HMAC-SHA256 of a message's parts, with one or several keys --------------------------------
#
# Rules
# 1. Every part is preceded by its length, so that two different messages never give the same bytes.
#    The version comes first, so that a signature of one version never fits another.
# 2. The first key signs; every key verifies. To rotate: add the new key at the end everywhere, then
#    move it to the front everywhere, then remove the old one.
# 3. Verification takes the same time for every wrong signature. No error shows a key.
#
# `aztask.message.signatures` says what is signed and when a signature is accepted.

SCHEME = "hmac-sha256:"
KEY_BYTES = 16
"""Bytes of the shortest accepted key."""


class Signer:
    """Signs and verifies with one or several keys; without a key it does neither."""

    __slots__ = ("_keys",)

    def __init__(self, keys: Sequence[bytes] = ()) -> None:
        """Raises ConfigurationError if a key is not bytes or has fewer than 16."""
        if isinstance(keys, bytes | str):
            raise ConfigurationError("signing_keys must be a list of keys; write [key]")
        for number, key in enumerate(keys, start=1):
            check_key(key, f"signing key {number}")
        self._keys = tuple(KeyedDigest(key) for key in keys)

    def __bool__(self) -> bool:
        return bool(self._keys)

    def __repr__(self) -> str:
        return f"<Signer: {len(self._keys)} keys>"

    def sign(self, parts: Sequence[bytes], version: int = 1) -> str:
        """The signature of `parts`: ``hmac-sha256:`` and 64 hexadecimal digits."""
        return SCHEME + self._keys[0].digest(_frame(parts, version)).hex()

    def matches(self, parts: Sequence[bytes], signature: str, version: int = 1) -> bool:
        """Whether one of the keys made `signature` over `parts`."""
        framed, given = _frame(parts, version), signature.encode("utf-8", "replace")
        found = [
            hmac.compare_digest((SCHEME + key.digest(framed).hex()).encode(), given)
            for key in self._keys
        ]
        return any(found)

    @staticmethod
    def scheme(digest: bytes) -> str:
        """The 32 bytes of a signature in the form that `sign` gives it."""
        return SCHEME + digest.hex()

    def verify(self, parts: Sequence[bytes], signature: object, version: int = 1) -> None:
        """Raise ContentRefused unless one of the keys made `signature` over `parts`."""
        if not signature or not isinstance(signature, str):
            raise refusal(None)
        if not self.matches(parts, signature, version):
            raise refusal(signature)


def refusal(signature: object) -> ContentRefused:
    """The error for a message whose signature is missing or does not match."""
    if not isinstance(signature, str) or not signature:
        return ContentRefused(
            "the message is not signed; give the sender a signing key, or remove the keys"
        )
    return ContentRefused(
        "the signature does not match: the message was changed on its way or to another queue, or"
        " its sender signs with a key that is not configured here"
    )


def check_key(key: object, what: str) -> None:
    """Raise ConfigurationError unless `key` is bytes, at least `KEY_BYTES` of them."""
    if not isinstance(key, bytes) or len(key) < KEY_BYTES:
        raise ConfigurationError(
            f"{what} must be bytes, at least {KEY_BYTES} of them;"
            " for example from secrets.token_bytes(32)"
        )


def _frame(parts: Sequence[bytes], version: int) -> bytes:
    framed = [len(part).to_bytes(8, "big") + part for part in parts]
    return b"aztask:%d" % version + b"".join(framed)


# -- what is signed, and how a signature is verified -----------------------------------------------

NOT_SIGNED: Final = frozenset(
    {SIGNATURE, SIGNATURE_2, "traceparent", "tracestate", "baggage", "Diagnostic-Id"}
)
"""Headers that are ignored, because tracing adds or replaces them on the way.

The last one is what the Azure SDKs add; the others are those of W3C Trace Context and Baggage.
"""

ANNOUNCED: Final = "; aztask-signature=2"
"""The parameter of the content type that announces version 2 (rule 3)."""

STORED: Final = "; aztask-stored="
"""The parameter of the content type that names the place of a stored message (rule 5)."""

VERSION: Final = 2
_VALUE: Final = re.compile(rf"2:([0-9]{{1,17}}):([0-9]{{1,17}}):({SCHEME}[0-9a-f]{{64}})", re.ASCII)
_LONGEST_DELAY: Final = 3e9


def _no_max_age(queue: str) -> float:
    return 0.0


def _now() -> float:
    return clock.wall()


@dataclass(frozen=True)
class SignatureRules:
    """When a signature is accepted.

    * `old`: write and accept version 1, too (rule 2).
    * `max_age`: queue -> seconds after which a message is refused, 0 for no limit. They count from
      the time at which the message could first be received: when it was sent, plus its delay.
    * `clock_skew`: seconds by which the clocks of sender and worker may differ.
    * `now`: the time, UTC epoch seconds.
    * `environment`: such as "staging"; messages of another one are refused.
    """

    old: bool = True
    max_age: Callable[[str], float] = _no_max_age
    clock_skew: float = 300.0
    now: Callable[[], float] = _now
    environment: str = ""


class Signatures:
    """Signs envelopes and verifies them; without a key it does neither."""

    __slots__ = ("_rules", "_signer")

    def __init__(self, keys: Sequence[bytes], rules: SignatureRules) -> None:
        """Raises ConfigurationError for a wrong key."""
        self._signer = Signer(keys)
        self._rules = rules if not rules.environment else replace(rules, old=False)

    def __bool__(self) -> bool:
        return bool(self._signer)

    @property
    def old(self) -> bool:
        """True if what a release before 0.2 has signed is accepted."""
        return bool(self._signer) and self._rules.old

    def signed(self, envelope: Envelope, queue: str, stored: str = "") -> Envelope:
        """The envelope with its signatures. Raises DecodeError for a value that has no bytes.

        * `stored`: the place of a message that is stored (rule 5); "" for one that is sent.
        """
        old = self._rules.old
        content_type = envelope.content_type + (_place(stored) if stored else "")
        content_type += ANNOUNCED if old else ""
        headers = dict(envelope.headers)
        envelope = changed(envelope, content_type=content_type, headers=headers)
        sent = self._rules.now()
        delay = envelope.delay if 0 <= envelope.delay < _LONGEST_DELAY else 0.0
        times = (round(sent * 1e6), round((sent + delay) * 1e6))
        signature = self._signer.sign(self._parts(envelope, queue, times), VERSION)
        headers[SIGNATURE_2] = f"2:{times[0]}:{times[1]}:{signature}"
        if old:  # which covers neither signature
            headers[SIGNATURE] = self._signer.sign(_old_parts(envelope, queue))
        return envelope

    def verify(
        self,
        envelope: Envelope,
        queue: str,
        limits: MessageLimits,
        *,
        any_age: bool = False,
        stored: str = "",
    ) -> None:
        """Raise ContentRefused unless the envelope is signed for `queue` and not too old.

        * `any_age`: skip the check of the age.
        * `stored`: as in `signed`: the place at which it was found.

        Raises DecodeError for headers that exceed the limits (rule 4).
        """
        self._check_place(str(envelope.content_type), stored)
        check_size(len(envelope.body), limits)
        check_before_signature(envelope.headers, limits)
        signature = envelope.headers.get(SIGNATURE_2)
        found = _VALUE.fullmatch(signature) if isinstance(signature, str) else None
        if found is not None:
            times = (int(found[1]), int(found[2]))
            if self._signer.matches(self._parts(envelope, queue, times), found[3], VERSION):
                if not any_age:
                    self._check_age(times[0] / 1e6, times[1] / 1e6, queue, self._rules.now())
                return
        old = envelope.headers.get(SIGNATURE)
        if self._rules.old and ANNOUNCED not in str(envelope.content_type):
            # A worker of aztask 0.1 signs its clones with version 1, and carries on a version 2
            # that was made for the original: a wrong one does not count here.
            self._signer.verify(_old_parts(envelope, queue), old or signature)
        elif old and not signature:
            raise ContentRefused(
                "the message has only a signature of version 1, which is not accepted: update its"
                " sender, or set old_signatures=True during a rolling upgrade"
            )
        else:
            raise refusal(signature)

    def age_at(self, envelope: Envelope, queue: str, now: float) -> str:
        """Why a verified message was too old at a time, or from its future; "" if it was not.

        * `now`: UTC epoch seconds.
        """
        found = _VALUE.fullmatch(str(envelope.headers.get(SIGNATURE_2)))
        if self._signer and found is not None:
            try:
                self._check_age(int(found[1]) / 1e6, int(found[2]) / 1e6, queue, now)
            except ContentRefused as error:
                return str(error)
        return ""

    def _check_place(self, content_type: str, stored: str) -> None:
        if STORED in content_type:
            if not stored:
                raise ContentRefused(
                    "the message was signed to be stored, and not to be sent: another program has"
                    " sent what waits in the result store for its turn"
                )
            if _place(stored) not in content_type:
                raise ContentRefused(
                    f"the message was signed for another place than that of {stored}"
                )
        elif stored and not self._rules.old:
            raise ContentRefused(
                "the message was not signed to be stored; a release before 0.2 did that: set"
                " old_signatures=True until all that it has stored was sent"
            )

    def _parts(self, envelope: Envelope, queue: str, times: tuple[int, int]) -> list[bytes]:
        return _parts(envelope, queue, times, self._rules.environment)

    def _check_age(self, sent: float, due: float, queue: str, now: float) -> None:
        limit = self._rules.max_age(queue)
        if not limit:
            return
        skew = self._rules.clock_skew
        if sent > now + skew:
            raise ContentRefused(
                f"the message was signed {sent - now:.0f} s in the future; set the clocks of"
                f" sender and worker, which may differ by {skew:g} s (signature_clock_skew)"
            )
        if now - due > limit + skew:
            raise ContentRefused(
                f"the message is {now - due:.0f} s old, and queue {queue} accepts at most"
                f" {limit:g} s (signature_max_age); if you know who sent it, run it with"
                " aztask dlq replay --refused"
            )


def _place(stored: str) -> str:
    """The parameter for a place; a digest, as names may have any characters."""
    return STORED + sha256(stored.encode("utf-8", "surrogatepass")).hexdigest()[:32]


def _parts(envelope: Envelope, queue: str, times: tuple[int, int], environment: str) -> list[bytes]:
    """What version 2 covers: one msgpack list of everything but the body, then the body."""
    properties = envelope.properties
    covered = [
        *times,
        queue,
        envelope.content_type,
        envelope.content_encoding,
        envelope.correlation_id,
        envelope.session,
        properties.get("reply_to") or None,
        properties.get("body_encoding") or None,
        _in_order({name: v for name, v in envelope.headers.items() if name not in NOT_SIGNED}),
    ]
    if environment:
        covered.append(environment)
    try:
        return [msgpack.packb(covered), envelope.body]
    except (TypeError, ValueError, OverflowError) as error:
        raise DecodeError(f"a signed header cannot be written: {error}") from None


_SINGLE: Final = frozenset({str, int, float, bool, bytes, type(None)})


def _in_order(value: Any) -> Any:
    """The value with the keys of its maps in order, so that a broker may reorder them."""
    if type(value) in _SINGLE:  # as most are: that a value is no Mapping takes longer to find out
        return value
    if isinstance(value, Mapping):
        return {name: _in_order(value[name]) for name in sorted(value)}
    if isinstance(value, list | tuple):
        return [_in_order(each) for each in value]
    return value


def _old_parts(envelope: Envelope, queue: str) -> list[bytes]:
    """What version 1 covers; an absent counter counts as 0."""
    headers = envelope.headers
    saved = headers.get("aztask-saved")
    return [
        envelope.body,
        _part(headers.get("task")),
        _part(headers.get("id")),
        _part(queue),
        _part(headers.get("aztask-generation", 0)),
        _part(headers.get("aztask-hop", 0)),
        _part(envelope.content_type),
        _part(envelope.content_encoding),
        bytes(saved) if isinstance(saved, bytes | bytearray | memoryview) else _part(saved),
    ]


def _part(value: object) -> bytes:
    if isinstance(value, str):
        return value.encode("utf-8", "surrogatepass")
    if isinstance(value, int) and not isinstance(value, bool) and abs(value) < 2**64:
        return b"%d" % value
    if value is None:
        return b""
    raise DecodeError(f"a signed header holds {type(value).__name__}, not text or a number")
