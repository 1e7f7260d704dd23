"""The lease document in a blob, for workers and senders of many machines.

A file of its own, which `aztask.leaseadvice.stores` imports late: the SDK of blobs is an extra.
"""

from __future__ import annotations

from dataclasses import replace

from aztask.address.addresses import BlobAddress
from aztask.address.owner import NO_OWNER, Owner
from aztask.azure.container import TaggedBlob
from aztask.leaseadvice.document import (
    ASIDE,
    NAME,
    SIZE_LIMIT,
    LeaseDocument,
    Stored,
    from_json,
    is_damaged,
    to_json,
)


class LeaseBlob:
    """The blob ``leases.json`` of a container or of a folder in it."""

    remote = True

    def __init__(self, address: BlobAddress, owner: Owner = NO_OWNER) -> None:
        """Connects at the first call. Raises ConfigurationError without a credential."""
        self.address = address
        self.owner = owner.of_broker
        self._blob = TaggedBlob(
            address, NAME, what="the lease document", content_type="application/json"
        )

    def __repr__(self) -> str:
        return f"<LeaseBlob {self.address}>"

    def load(self) -> Stored:
        """Read the blob, see `LeaseStore.load`. Needs permission to read blobs."""
        data, tag = self._read()
        if tag is None:
            return Stored(LeaseDocument(owner=self.owner), None)
        return Stored(from_json(data, self.owner), tag)

    def publish(self, document: LeaseDocument, based_on: Stored) -> bool:
        """Write the blob, see `LeaseStore.publish`. Needs permission to write blobs.

        A missing container is created. If the reply is lost, the document may be stored; the next
        try is then refused, and reads it.
        """
        data = to_json(replace(document, revision=based_on.document.revision + 1))
        return self._blob.write(data, based_on.tag)

    def set_aside(self) -> str | None:
        """Copy a damaged document to another blob and delete it, see `LeaseStore.set_aside`."""
        data, tag = self._read()
        if tag is None or not is_damaged(data):
            return None
        return self._blob.move(data, tag, ASIDE)

    def close(self) -> None:
        """Close idle connections to the blob service."""
        self._blob.close()

    def _read(self) -> tuple[bytes, str | None]:
        # one byte more than a document may have, so that a document that is too long is noticed
        return self._blob.read(SIZE_LIMIT + 1)
