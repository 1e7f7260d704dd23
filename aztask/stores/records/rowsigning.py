"""What one result store encrypts and signs, and what it believes of what is signed.

Rules
1. With keys, outcomes and checkpoints of runs, documents of workflows, pieces that are appended to
   them, and control entries are signed as they are written (`aztask.message.rowsignatures`), each
   alone: many writers change one document, and no signature of one could cover what another wrote.
2. A row whose signature does not fit is damaged: it is not obeyed, and is kept as it is. Each read
   decides that anew, since a key that is configured later makes it fit (`REVISED`). Unsigned rows
   are obeyed until ``old_signatures=False``.
3. The digest of an outcome's value is within the signature: a long value, in a blob of its own,
   is checked when it is read, also without keys.
4. A program without keys reads everything. It cannot verify it, and its log says so once.
5. What a program without an owner signed is believed by all owners, as its rows are read by all.
6. A row of another owner is only shown. It is compared with that owner's mark, and is never damaged
   by its signature: whose rows that owner adopted, and its other keys, are not known here.
7. When an owner adopts the rows of another one, their signatures stay those of the former owner;
   the new owner keeps a signed note of that.
8. With encryption, the value and the error's text and traceback of an outcome are encrypted
   together, and so are each checkpoint, document and piece, for its place. Signatures cover what is
   stored, so a program without the keys verifies it. It sees how a run ended, and the type of its
   error; its value says which key is missing when it is decoded.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import replace
from hashlib import sha256
from typing import Final

import msgpack

from aztask.address.owner import NO_OWNER, Owner
from aztask.errors import DecodeError, KeyMissing
from aztask.message.encryption import Locked, is_encrypted
from aztask.message.rowsignatures import Purpose, RowSignatures, mark_in
from aztask.settlement import to_record
from aztask.stores.layout import SqlLayout, TablesLayout
from aztask.stores.records.base import Outcome, RunKey, RunRecord
from aztask.stores.records.damage import Damaged, unpacked
from aztask.stores.records.owners import is_foreign
from aztask.stores.rows import Kind, Place, RowStore
from aztask.support.clock import monotonic
from aztask.support.floodlog import FloodLog

logger = logging.getLogger(__name__)

ADOPTIONS: Final = Kind(
    {"signature": bytes},
    SqlLayout(
        "owned_adoptions",
        "adoptions",
        "mark",
        steps={
            "adoptions": (
                """
                CREATE TABLE adoptions (
                    mark TEXT PRIMARY KEY, version INTEGER NOT NULL, signature BLOB) WITHOUT ROWID;
                CREATE TABLE owned_adoptions (
                    broker TEXT NOT NULL, mark TEXT NOT NULL, version INTEGER NOT NULL,
                    signature BLOB, PRIMARY KEY (broker, mark)) WITHOUT ROWID;
                """,
            )
        },
    ),
    TablesLayout("Y", "y"),
)
"""The owners whose rows were adopted, by their marks."""

LOOK_AGAIN_SECONDS: Final = 10.0
DIGEST_BYTES: Final = 32
CHANGED: Final = (
    "its signature does not fit: it was changed or copied from another place, or its writer signs"
    " with a key that is not configured here"
)
VALUE_CHANGED: Final = (
    "its value does not fit its signature: it was changed, or copied from another place"
)
UNSIGNED: Final = (
    "it is not signed, and old_signatures is False: a program without signing keys wrote it, or a"
    " release before 0.2"
)
REVISED: Final = frozenset({CHANGED, UNSIGNED})
"""Reasons that end with the settings of the reader: a mark of the quarantine with one of them only
lists the row."""
LOCKED: Final = "(encrypted with a key that this program does not have)"
"""The text of an error that cannot be decrypted here."""
_NOTHING: Final = (None, b"", b"\xc0")
"""Values that say nothing: most tasks return None."""
_OUTCOME: Final = "outcome"
_CHECKPOINT: Final = "checkpoint"
NOT_VERIFIED: Final = (
    "the results of this store are signed, but this program has no signing keys: it reads them, and"
    " they are not verified"
)


def _with(outcome: Outcome, value: bytes | None, error: str, traceback: str) -> Outcome:
    """The outcome with another content; `replace` would cost 1 µs more, for each task twice."""
    return Outcome(
        outcome.state,
        outcome.settlement,
        value,
        outcome.error_type,
        error,
        traceback,
        outcome.at,
        outcome.duration,
    )


class RowSigner:
    """Signs and verifies the rows of one owner in one store. Any thread may call."""

    def __init__(
        self, signatures: RowSignatures | None, owner: Owner, store: RowStore | None = None
    ) -> None:
        """signatures: None or without keys, nothing is signed. store: keeps what was adopted."""
        self._signatures = RowSignatures() if signatures is None else signatures
        self.cipher = self._signatures.cipher
        self._owner = owner.of_broker
        self._mark = owner.of_broker.mark
        self._store = store
        self._adopted: set[str] = set()
        self._look_at = 0.0
        self._floods = FloodLog()
        self._told = False

    def __bool__(self) -> bool:
        """True if it signs and verifies."""
        return bool(self._signatures)

    @property
    def old(self) -> bool:
        """True if unsigned rows are obeyed."""
        return self._signatures.old

    def sign(self, purpose: Purpose, place: Sequence[str | int], *parts: bytes) -> bytes | None:
        """The signature of a row at that place; None without keys."""
        if not self._signatures:
            return None
        return self._signatures.sign(purpose, self._mark, place, parts)

    def objection(
        self, purpose: Purpose, place: Sequence[str | int], signature: object, *parts: bytes
    ) -> str:
        """Why a row that was read is not believed; "" if it is."""
        if not self._signatures:
            if signature is not None:
                self._tell()
            return ""
        if signature is None:
            return "" if self.old else UNSIGNED
        if not isinstance(signature, bytes):
            return CHANGED
        if not self._signatures.matches(purpose, place, parts, signature):
            return CHANGED
        mark = mark_in(signature)
        known = mark in ("", self._mark) or not self._mark or self._knows(mark)
        return "" if known else CHANGED

    def refuse(self, what: str, reason: str) -> None:
        """Log that a row is not obeyed."""
        self._floods.warning(logger, what.partition(" ")[0], "%s is not obeyed: %s", what, reason)

    def _tell(self) -> None:
        if not self._told:
            self._told = True
            logger.info(NOT_VERIFIED)

    # -- encryption --------------------------------------------------------------------------

    def closed(self, key: RunKey, outcome: Outcome) -> Outcome:
        """The outcome as it is stored: what is encrypted of it is its value."""
        if not self.cipher.encrypts or is_encrypted(outcome.value):
            return outcome
        if outcome.value in _NOTHING and not outcome.error and not outcome.traceback:
            return outcome
        parts = (outcome.value, outcome.error, outcome.traceback)
        packed = msgpack.packb(parts, unicode_errors="surrogatepass")
        value = self.cipher.encrypt(packed, _OUTCOME, *_place_of(key))
        return _with(outcome, value, "", "")

    def opened(self, key: RunKey, outcome: Outcome) -> Outcome:
        """What `closed` made, in clear; without its key, as it is. Raises Damaged."""
        value = outcome.value
        if not is_encrypted(value):
            return outcome
        try:
            data = self.decrypted(value, _OUTCOME, *_place_of(key))
        except (KeyMissing, Locked):
            return replace(outcome, error=LOCKED) if outcome.error_type else outcome
        match unpacked(data, "value"):
            case [bytes() | None as inner, str() as error, str() as traceback]:
                return _with(outcome, inner, error, traceback)
        raise Damaged("its value is not that of an outcome")

    def without_text(self, record: RunRecord) -> RunRecord:
        """A record of which a note in clear is made: with encryption, without its error's text."""
        if not self.cipher.encrypts or record.outcome is None:
            return record
        return replace(record, outcome=replace(record.outcome, error=""))

    def decrypted(self, data: bytes, *identity: str | int) -> bytes:
        """The data in clear. Raises Damaged."""
        try:
            return self.cipher.decrypt(data, *identity)
        except DecodeError as error:
            raise Damaged(str(error)) from None

    def closed_saved(self, key: RunKey, state: bytes) -> bytes:
        """A checkpoint as it is stored."""
        if not self.cipher.encrypts:
            return state
        return self.cipher.encrypt(state, _CHECKPOINT, *_place_of(key))

    def _opened_saved(self, key: RunKey, state: bytes) -> bytes | None:
        """A checkpoint in clear; None if it is refused.

        Raises BrokerUnavailable without its key: the task must not begin anew for that.
        """
        if not is_encrypted(state):
            return state
        if missing := self.cipher.missing(state):
            raise Locked(f"the checkpoint of task {key.task_id} waits: {missing}")
        try:
            return self.decrypted(state, _CHECKPOINT, *_place_of(key))
        except Damaged as damage:
            self.refuse(f"checkpoint of task {key.task_id}", damage.reason)
            return None

    # -- outcomes ----------------------------------------------------------------------------

    def sign_outcome(self, key: RunKey, outcome: Outcome, body: bytes | None) -> bytes | None:
        """The signature of an outcome, and behind it the digest of its `body` (`pack_body`)."""
        if not self._signatures:
            return None
        digest = sha256(body or b"").digest()
        core = self.sign(Purpose.RESULT, _place_of(key), _head_of(outcome), digest)
        return None if core is None else core + digest

    def check_outcome(
        self, key: RunKey, outcome: Outcome, signature: bytes | None, broker: str = ""
    ) -> bool:
        """Check all of an outcome but its body; returns True if it cannot be verified here.

        broker: whose row it is, "" if it has no owner. Raises Damaged, but not for another owner's.
        """
        if not self._signatures:
            if signature is not None:
                self._tell()
            return signature is not None
        foreign = is_foreign(self._owner, broker)
        reader = RowSigner(self._signatures, Owner(broker)) if foreign else self
        reason = reader._objection_to(key, outcome, signature)
        if reason and not foreign:
            raise Damaged(reason)
        return bool(reason)

    def _objection_to(self, key: RunKey, outcome: Outcome, signature: bytes | None) -> str:
        """Why an outcome is not believed; "" if it is."""
        if signature is None:
            return self.objection(Purpose.RESULT, _place_of(key), None)
        core, digest = signature[:-DIGEST_BYTES], signature[-DIGEST_BYTES:]
        return self.objection(Purpose.RESULT, _place_of(key), core, _head_of(outcome), digest)

    def check_body(self, body: bytes | None, signature: bytes | None) -> None:
        """Check the body of an outcome, which needs no key. Raises Damaged."""
        if signature is not None and sha256(body or b"").digest() != signature[-DIGEST_BYTES:]:
            raise Damaged(VALUE_CHANGED)

    # -- checkpoints -------------------------------------------------------------------------

    def sign_saved(self, key: RunKey, state: bytes) -> bytes | None:
        """The signature of a checkpoint, and behind it its digest; None without keys."""
        core = self.sign(Purpose.CHECKPOINT, _place_of(key), state)
        return None if core is None else core + sha256(state).digest()

    def believed_saved(self, key: RunKey, state: bytes | None, signature: object) -> bytes | None:
        """A checkpoint in clear; None if it is refused, so that the task begins anew.

        A release that knows no signatures leaves that of an earlier checkpoint, whose digest is
        another one: its own is unsigned.
        """
        if state is None:
            return None
        core = signature
        if isinstance(signature, bytes):
            core, digest = signature[:-DIGEST_BYTES], signature[-DIGEST_BYTES:]
            core = core if digest == sha256(state).digest() else None
        reason = self.objection(Purpose.CHECKPOINT, _place_of(key), core, state)
        if reason:
            self.refuse(f"checkpoint of task {key.task_id}", reason)
            return None
        return self._opened_saved(key, state)

    # -- adoption ----------------------------------------------------------------------------

    def adopt(self, old: Owner) -> None:
        """Believe the rows of another owner from now on, and those that it had adopted."""
        if not self._signatures or self._store is None:
            return
        former = RowSigner(self._signatures, old, self._store)
        rows = self._store.of(ADOPTIONS)
        for mark in {old.of_broker.mark, *former.adopted()} - {"", self._mark}:
            place = Place(self._owner, mark)
            signature = self._signatures.sign(Purpose.ADOPTION, self._mark, [mark], [])
            rows.put(place, {"signature": signature})
        self._look_at = 0.0

    def adopted(self) -> set[str]:
        """The marks of the owners whose rows were adopted."""
        if self._store is None or not self._owner.known:
            return set()
        return {
            row.place.partition
            for row in self._store.of(ADOPTIONS).of_owner(self._owner)
            if isinstance(found := row.values["signature"], bytes)
            and mark_in(found) == self._mark
            and self._signatures.matches(Purpose.ADOPTION, [row.place.partition], [], found)
        }

    def _knows(self, mark: str) -> bool:
        if mark not in self._adopted and monotonic() >= self._look_at:
            self._adopted = self.adopted()
            self._look_at = monotonic() + LOOK_AGAIN_SECONDS
        return mark in self._adopted


NO_SIGNER: Final = RowSigner(None, NO_OWNER)
"""Signs nothing and believes everything."""


def pack_body(outcome: Outcome) -> bytes | None:
    """The parts of an outcome that may be long, packed; None if they are empty."""
    parts = (outcome.value, outcome.error_type, outcome.error, outcome.traceback)
    if not any(part is not None and part != "" for part in parts):
        return None
    packed: bytes = msgpack.packb(parts, unicode_errors="surrogatepass")
    return packed


def _place_of(key: RunKey) -> tuple[str, int, int]:
    return key.task_id, key.generation, key.hop


def _head_of(outcome: Outcome) -> bytes:
    """What the row itself has of an outcome."""
    settlement = to_record(outcome.settlement)
    head = [outcome.state.value, settlement, float(outcome.at), float(outcome.duration)]
    packed: bytes = msgpack.packb(head, unicode_errors="surrogatepass")
    return packed
