"""Workflows' documents and the pieces that are appended to them, as they are encrypted and signed.

Rules
1. A document whose signature does not fit is read as empty, which is damaged.
2. A piece whose signature does not fit is skipped, and the others count: the task that a forged bit
   is about still sets it.
3. Both say so (`Believed.refused`), so that nothing is signed anew that was refused.
4. With encryption, a document and each piece are encrypted alone, for their place, and then signed.
   What is encrypted with a key that is missing here is no damage: BrokerUnavailable.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Final, NamedTuple

import msgpack

from aztask.message.encryption import Locked, is_encrypted
from aztask.message.rowsignatures import Purpose
from aztask.stores.records.damage import Damaged
from aztask.stores.records.rowsigning import CHANGED, RowSigner
from aztask.stores.records.workflows import Addition, DocumentChange

_DOCUMENT: Final = "document"
_PIECE: Final = "piece"


class Believed(NamedTuple):
    """What is believed of a document. `refused`: why the rest is not; "" if all of it is."""

    data: bytes
    refused: str = ""


class SignedDocuments:
    """Encrypts and signs documents and pieces, and reads those that are believed.

    Any thread may call.
    """

    def __init__(self, signer: RowSigner) -> None:
        self._signer = signer
        self._cipher = signer.cipher

    def closed(self, change: DocumentChange) -> DocumentChange:
        """A new version as it is stored, to be signed."""
        if not self._cipher.encrypts:
            return change
        data = self._cipher.encrypt(change.data, _DOCUMENT, change.workflow, change.name)
        return replace(change, data=data)

    def closed_pieces(self, addition: Addition) -> Addition:
        """Pieces as they are stored, to be signed."""
        if not self._cipher.encrypts:
            return addition
        place = (addition.workflow, addition.name)
        pieces = {
            name: self._cipher.encrypt(piece, _PIECE, *place)
            for name, piece in addition.pieces.items()
        }
        return replace(addition, pieces=pieces)

    @property
    def takes_unsigned(self) -> bool:
        """True if documents are signed, and those that are not are believed."""
        return bool(self._signer) and self._signer.old

    def of_document(self, change: DocumentChange) -> bytes | None:
        """The signature of a new version; None without keys."""
        place = (change.workflow, change.name)
        return self._signer.sign(Purpose.WORKFLOW, place, change.data)

    def of_pieces(self, addition: Addition) -> dict[str, bytes]:
        """The signatures of pieces by their names; none without keys."""
        place = (addition.workflow, addition.name)
        signed = {
            name: self._signer.sign(Purpose.PIECE, place, piece)
            for name, piece in addition.pieces.items()
        }
        return {name: each for name, each in signed.items() if each is not None}

    def believed_parts(
        self, place: tuple[str, str], parts: Sequence[tuple[bytes, bytes | None]]
    ) -> Believed:
        """A document and its pieces, each with its signature: what is believed of them, joined."""
        (data, signature), *pieces = parts
        if reason := self._signer.objection(Purpose.WORKFLOW, place, signature, data):
            return self._refused(place, reason)
        try:
            believed, refused = [self._opened(_DOCUMENT, place, data)], ""
        except Damaged as damage:
            return self._refused(place, damage.reason)
        for piece, each in pieces:
            reason = self._signer.objection(Purpose.PIECE, place, each, piece)
            try:
                if not reason:
                    believed.append(self._opened(_PIECE, place, piece))
                    continue
            except Damaged as damage:
                reason = damage.reason
            self._signer.refuse(f"piece of document {place[1]} of workflow {place[0]}", reason)
            refused = reason
        return Believed(b"".join(believed), refused)

    def believed_copy(self, place: tuple[str, str], data: bytes, signature: bytes | None) -> bytes:
        """A document that another one counts more than, in clear; b"" if it is not believed."""
        try:
            if not self._signer.objection(Purpose.WORKFLOW, place, signature, data):
                return self._opened(_DOCUMENT, place, data)
        except (Damaged, Locked):
            pass
        return b""

    def _opened(self, what: str, place: tuple[str, str], data: bytes) -> bytes:
        """A document or a piece in clear. Raises Damaged; BrokerUnavailable without its key."""
        if not is_encrypted(data):
            return data
        if missing := self._cipher.missing(data):
            raise Locked(f"document {place[1]} of workflow {place[0]} waits: {missing}")
        return self._signer.decrypted(data, what, *place)

    def _refused(self, place: tuple[str, str], reason: str) -> Believed:
        self._signer.refuse(f"document {place[1]} of workflow {place[0]}", reason)
        return Believed(b"", reason)

    # -- all in one column -------------------------------------------------------------------

    def joined(self, change: DocumentChange) -> bytes | None:
        """The signature of a new version with its length, to which `joined_pieces` are appended."""
        signature = self.of_document(change)
        return None if signature is None else _entry(change.data, signature)

    def joined_pieces(self, addition: Addition) -> tuple[bytes, bytes | None]:
        """Pieces joined, and their signatures joined, each with its length; None without keys."""
        data = b"".join(addition.pieces.values())
        if not self._signer:
            return data, None
        signed = self.of_pieces(addition)
        return data, b"".join(_entry(addition.pieces[name], each) for name, each in signed.items())

    def believed(self, place: tuple[str, str], data: object, signatures: object) -> Believed:
        """What is believed of a document with its pieces, and of what `joined` made of them."""
        if not isinstance(data, bytes):
            return Believed(b"", "its data are no bytes")
        # Without signing keys the lengths count alone: they say where each encrypted piece ends.
        if not isinstance(signatures, bytes) or not (self._signer or is_encrypted(data)):
            return self.believed_parts(place, [(data, None if signatures is None else b"")])
        parts, at = [], 0
        for length, signature in _entries(signatures):
            parts.append((data[at : at + length], signature))
            at += length
        if at != len(data) or not parts:
            return self._refused(place, CHANGED)
        return self.believed_parts(place, parts)


def _entry(data: bytes, signature: bytes) -> bytes:
    packed: bytes = msgpack.packb([len(data), signature])
    return packed


def _entries(signatures: bytes) -> list[tuple[int, bytes]]:
    """What `_entry` packed; nothing if another program wrote anything else."""
    unpacker = msgpack.Unpacker(max_buffer_size=0)
    unpacker.feed(signatures)
    try:
        found = list(unpacker)
    except (ValueError, TypeError, msgpack.UnpackException, RecursionError):
        return []
    good = all(
        isinstance(each, list)
        and len(each) == 2
        and type(each[0]) is int
        and each[0] >= 0
        and isinstance(each[1], bytes)
        for each in found
    )
    return [(length, signature) for length, signature in found] if good else []
