"""Values and checkpoints that do not fit into a row, each in a blob of its own.

Rules
1. A blob is written once, under a unique name, before the row that names it. It is deleted after
   that row is deleted or names another blob.
2. If the process dies in between, a blob is left over that no row names. Its name begins with the
   hour it was written in and contains the key of its row, so `purge` finds such blobs without
   reading recent ones, and checks their rows.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable
from datetime import UTC, datetime
from functools import cached_property
from typing import Any, Final, Protocol, cast

from azure.core.credentials import TokenCredential
from azure.storage.blob import ContainerClient

from aztask.address.addresses import BlobAddress, TablesAddress
from aztask.azure.container import container_client
from aztask.errors import AztaskError
from aztask.stores.records.base import RunKey
from aztask.stores.records.tables.names import partition_of, row_of
from aztask.stores.records.tables.rows import INLINE_BYTES
from aztask.stores.tables.client import TimeBudget
from aztask.stores.tables.errors import BLOB_ROLE, AlreadyExists, RowNotFound
from aztask.support import chance
from aztask.support.clock import Clock, monotonic

logger = logging.getLogger(__name__)

PAGE: Final = 1000
DELETE_SECONDS: Final = 5.0
NOBODY: Final = "aztask-check"


class BlobPages(Protocol):
    """The SDK's pages of a listing. Its annotations leave out the token."""

    continuation_token: str | None

    def __next__(self) -> Iterable[str]: ...

    def __iter__(self) -> BlobPages: ...


class Blobs:
    """The blob container of a store. Any thread may call."""

    def __init__(
        self,
        address: TablesAddress,
        container: str,
        clock: Clock,
        credential: TokenCredential | None = None,
    ) -> None:
        """Connects at the first blob: a store whose values are small needs no blob service."""
        self.place = f"the container {container!r} of {address}"
        self._address = BlobAddress(
            address.account,
            address.blob_endpoint,
            container,
            "",
            address.key,
            address.signature,
        )
        self._clock = clock
        self._credential = credential

    @cached_property
    def _container(self) -> ContainerClient:
        return container_client(self._address, given=self._credential)

    def place_of(
        self, call: TimeBudget, key: RunKey, data: bytes | None
    ) -> tuple[bytes | None, str]:
        """The row's two fields: the data itself, or, if it is long, the name of its new blob."""
        return self.place_at(call, partition_of(key.task_id), row_of(key), data)

    def place_at(
        self, call: TimeBudget, partition: str, row: str, data: bytes | None
    ) -> tuple[bytes | None, str]:
        """The same for the row with these keys, whose property ``body_blob`` names the blob."""
        if data is None or len(data) <= INLINE_BYTES:
            return data, ""
        hour = hour_of(self._clock.wall())
        name = f"{hour}/{partition}!{row}!{chance.token()}"
        blob = self._container.get_blob_client(name)
        # the name is unique, so after a lost answer the blob may be written again
        call.request(
            lambda **times: blob.upload_blob(data, overwrite=True, **times),
            self.place,
            BLOB_ROLE,
            again=True,
        )
        return None, name

    def load(self, call: TimeBudget, data: bytes | None, name: str) -> bytes | None:
        """The row's data, or that of the blob it names. Raises RowNotFound if the blob is gone."""
        if not name:
            return data
        blob = self._container.get_blob_client(name)
        return call.request(
            lambda **times: bytes(blob.download_blob(**times).readall()),
            self.place,
            BLOB_ROLE,
            again=True,
        )

    def delete(self, *names: str) -> None:
        """Delete these blobs; if that fails now, a later sweep deletes them."""
        for name in filter(None, names):
            blob = self._container.get_blob_client(name)
            try:
                TimeBudget(DELETE_SECONDS).request(
                    blob.delete_blob,
                    self.place,
                    BLOB_ROLE,
                    again=True,
                )
            except RowNotFound:
                continue
            except AztaskError as error:
                logger.info("a blob could not be deleted, the next sweep tries again: %s", error)

    def older(
        self, call: TimeBudget, before: float, after: str | None = None
    ) -> tuple[list[tuple[str, str, str]], str | None]:
        """One page of the blobs written before that hour: names, and the keys of their rows.

        * `after`: the place where the page before ended, None for the first page.

        Returns the page, and the place where it ended; None if it was the last.
        """
        limit = hour_of(before)

        def ask(**times: Any) -> tuple[list[str], str | None]:
            listed = self._container.list_blob_names(results_per_page=PAGE, **times)
            pages = cast("BlobPages", listed.by_page(after))
            return list(next(pages, ())), pages.continuation_token

        names, place = call.request(ask, self.place, BLOB_ROLE, again=True)
        found: list[tuple[str, str, str]] = []
        for name in names:
            hour, _, rest = name.partition("/")
            if hour >= limit:
                return found, None
            partition, _, more = rest.partition("!")
            found.append((name, partition, more.partition("!")[0]))
        return found, place or None

    def measure(self, seconds: float) -> tuple[int, int, bool]:
        """Count for `seconds` at most: blobs, their bytes, and True if that is all of them."""
        until = monotonic() + seconds
        count, size = 0, 0
        call = TimeBudget()

        def ask(**times: Any) -> list[Any]:
            return list(next(pages, ()))

        pages = self._container.list_blobs(results_per_page=PAGE).by_page()
        while monotonic() < until:
            page = call.request(ask, self.place, BLOB_ROLE)
            if not page:
                return count, size, True
            count += len(page)
            size += sum(blob.size or 0 for blob in page)
        return count, size, False

    def create(self, call: TimeBudget) -> bool:
        """Create the container; False if it exists."""
        try:
            call.request(
                self._container.create_container,
                self.place,
                BLOB_ROLE,
                again=True,
            )
        except AlreadyExists:
            return False
        return True

    def check(self, call: TimeBudget) -> None:
        """Raise the error that reading a value would raise."""
        try:
            self.load(call, None, NOBODY)
        except RowNotFound:
            return

    def close(self) -> None:
        """Close idle connections to the blob service."""
        if "_container" in self.__dict__:
            self._container.close()


def hour_of(at: float) -> str:
    """The hour in UTC, such as ``2026112119``: sorts as the times do."""
    latest = datetime.max.replace(tzinfo=UTC).timestamp() - 86400.0
    return datetime.fromtimestamp(max(0.0, min(at, latest)), UTC).strftime("%Y%m%d%H")


def missing(name: str) -> str:
    """The damage of a row that names a missing blob."""
    return f"its value is no longer in the container (blob {name}): the blob was deleted"
