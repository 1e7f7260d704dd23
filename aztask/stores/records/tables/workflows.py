"""Workflows in Azure Tables: their documents, and the index of open and ended ones.

Partitions
* ``g-WORKFLOW;DOCUMENT``: one document, in its only row ``d``. A long document is in a blob. An
  appended piece is a property of its own, ``piece_NAME``, which a merge sets without a condition.
  With signing keys, ``signature`` covers the document and ``signature_NAME`` the piece.
* ``o-SHARD``: open workflows of all owners: a workflow id is in one place, so that the second owner
  of it finds the first.
* ``em-MARK-SHARD``: ended workflows of an owner; their row keys count down, so that the newest come
  first. ``e-SHARD``: those without an owner.

A row of an open or ended workflow has a copy of what a list shows, ``summary``, encrypted and
signed as a document of that name: reading each root would be a request for each.

Each row has the owner's broker. An older release drops it from a document that it rewrites; the
next write of its owner, or `own_workflow`, adds it again.
"""

from __future__ import annotations

import heapq
from collections.abc import Mapping, Sequence
from dataclasses import replace
from hashlib import sha256
from operator import attrgetter
from typing import Any, Final, cast

from aztask.address.owner import NO_OWNER, Owner
from aztask.stores.layout import SHARDS, key_text, shard_of
from aztask.stores.records.base import UNFINISHED_SECONDS
from aztask.stores.records.damage import Columns, Damaged
from aztask.stores.records.documentsigning import SignedDocuments
from aztask.stores.records.owners import foreign_id, is_foreign, is_other_broker
from aztask.stores.records.rowsigning import NO_SIGNER, RowSigner
from aztask.stores.records.tables.blobs import Blobs
from aztask.stores.records.tables.index import count_down
from aztask.stores.records.tables.rows import broker_in
from aztask.stores.records.tables.runs import PARTITION as OWNERS
from aztask.stores.records.workflows import ROOT, Addition, Document, DocumentChange, ListedWorkflow
from aztask.stores.tables.client import PAUSES, TableRequests, TimeBudget
from aztask.stores.tables.errors import OutcomeUnknown, RowNotFound
from aztask.support.clock import sleep

ROW: Final = "d"
BATCH: Final = 256
DOCUMENTS: Final = 100_000
PIECE: Final = "piece_"
SIGNATURE: Final = "signature"
SUMMARY: Final = "summary"

_END: Final = "~"


class TablesWorkflows:
    """The implementation of `aztask.stores.records.workflows.WorkflowStore` in a table."""

    def __init__(
        self,
        requests: TableRequests,
        blobs: Blobs,
        owner: Owner = NO_OWNER,
        signer: RowSigner = NO_SIGNER,
    ) -> None:
        """owner: whose workflows it makes and acts on; NO_OWNER: those of everyone."""
        self._signed = SignedDocuments(signer)
        self._owner = owner.of_broker
        self._requests = requests
        self._blobs = blobs

    # -- documents ---------------------------------------------------------------------------

    def read(self, names: Sequence[tuple[str, str]]) -> list[Document | None]:
        """The documents with these names, in parallel; None for missing ones."""
        found: list[Document | None] = []
        for first in range(0, len(names), BATCH):
            part = names[first : first + BATCH]
            found += self._requests.each(TimeBudget(), self._read, part)
        return found

    def _read(self, call: TimeBudget, name: tuple[str, str]) -> Document | None:
        for _ in range(3):
            entity = self._requests.read(call, _partition(*name), ROW)
            if entity is None:
                return None
            self._check(name[0], broker_in(entity))
            try:
                return self._document(call, name, entity)
            except RowNotFound:
                continue  # it was replaced after we read it, and its blob deleted
            except Damaged:
                break
        return Document(b"", "", refused="it is damaged")

    def _document(
        self, call: TimeBudget, place: tuple[str, str], entity: Mapping[str, Any]
    ) -> Document:
        """Raises Damaged, and RowNotFound if its blob is missing."""
        columns = Columns(entity)
        blob = columns.text("body_blob", missing="")
        data = self._blobs.load(call, columns.data("data"), blob) or b""
        names = _pieces(entity)
        pieces = [(columns.data(name) or b"", columns.data(_signature(name))) for name in names]
        signature = columns.data(SIGNATURE)
        data, refused = self._signed.believed_parts(place, [(data, signature), *pieces])
        tag = _tag(_etag(entity), blob)
        return Document(data, tag, len(names), broker_in(entity), refused)

    def write(self, changes: Sequence[DocumentChange]) -> list[str | None]:
        """Make each change, in parallel; each costs one request, and one more for a long one."""
        tags: list[str | None] = []
        for first in range(0, len(changes), BATCH):
            part = changes[first : first + BATCH]
            tags += self._requests.each(TimeBudget(), self._write, part)
        return tags

    def _write(self, call: TimeBudget, change: DocumentChange) -> str | None:
        change = self._signed.closed(change)
        partition = _partition(change.workflow, change.name)
        data, blob = self._blobs.place_at(call, partition, ROW, change.data)
        entity: dict[str, Any] = {"PartitionKey": partition, "RowKey": ROW, **self._stamp}
        entity.update({"body_blob": blob} if blob else {"data": data})
        signature = self._signed.of_document(change)
        entity.update({} if signature is None else {SIGNATURE: signature})
        old_etag, old_blob = _parts(change.tag)
        etag = self._put(call, entity, None if change.tag is None else old_etag)
        if etag is None:
            self._blobs.delete(blob)
            return None
        self._blobs.delete(old_blob)
        return _tag(etag, blob)

    def _put(self, call: TimeBudget, entity: Mapping[str, Any], tag: str | None) -> str | None:
        """Insert or replace a row; returns its ETag, None if it exists or has changed since.

        While it is unknown whether that was carried out, it is repeated: None would say that the
        document is there, and who starts a workflow would go on without its plan.
        """
        doubtful = False
        while True:
            try:
                if tag is None:
                    etag = self._requests.insert(call, entity)
                else:
                    etag = self._requests.replace(call, entity, tag)
            except OutcomeUnknown as lost:
                doubtful = True
                if call.remaining <= PAUSES[0]:
                    raise call.stop(lost.error) from lost
                sleep(PAUSES[0])
            else:
                return self._written(call, entity) if etag is None and doubtful else etag

    def append(self, additions: Sequence[Addition]) -> list[Document | None]:
        """Append pieces, in parallel; each costs two requests, however many writers there are."""
        found: list[Document | None] = []
        for first in range(0, len(additions), BATCH):
            part = additions[first : first + BATCH]
            found += self._requests.each(TimeBudget(), self._append, part)
        return found

    def _append(self, call: TimeBudget, addition: Addition) -> Document | None:
        addition = self._signed.closed_pieces(addition)
        partition = _partition(addition.workflow, addition.name)
        pieces = {f"{PIECE}{name}": data for name, data in addition.pieces.items()}
        signatures = {
            f"{SIGNATURE}_{name}": signature
            for name, signature in self._signed.of_pieces(addition).items()
        }
        entity = {"PartitionKey": partition, "RowKey": ROW, **pieces, **signatures}
        if not self._requests.add(call, entity):
            return None
        return self._read(call, (addition.workflow, addition.name))

    def _written(self, call: TimeBudget, entity: Mapping[str, Any]) -> str | None:
        """The tag of the row, if it is as we wrote it; None if it is another one.

        With pieces it is another one: they were appended since.
        """
        found = self._requests.read(call, entity["PartitionKey"], ROW)
        if found is None or _pieces(found):
            return None
        same = all(found.get(name) == entity.get(name) for name in ("data", "body_blob"))
        return _etag(found) if same else None

    def exists(self, call: TimeBudget, workflow: str) -> bool:
        """True if the workflow was started and is not deleted."""
        return self._requests.read(call, _partition(workflow, ROOT), ROW, ("RowKey",)) is not None

    # -- the index ---------------------------------------------------------------------------

    def announce(self, workflow: str, at: float, summary: bytes = b"") -> None:
        """List it as open since `at`, unless it is listed.

        Crash window: if its root is not written after that, it is listed as open until housekeeping
        finds that it was never started.
        """
        call = TimeBudget()
        row = {**_open(workflow, at), **self._stamp, **self._summary(workflow, summary)}
        if not self._requests.ensure(call, row):
            found = self._requests.read(call, row["PartitionKey"], row["RowKey"])
            self._check(workflow, "" if found is None else broker_in(found))

    def describe(self, workflow: str, at: float, summary: bytes) -> None:
        """Give it another summary, if it is listed as open since `at`."""
        row = _open(workflow, at)
        place = {name: row[name] for name in ("PartitionKey", "RowKey")}
        self._requests.add(TimeBudget(), {**place, **self._summary(workflow, summary)})

    def _summary(self, workflow: str, summary: bytes) -> dict[str, Any]:
        """The properties with a summary; none without one."""
        if not summary:
            return {}
        change = self._signed.closed(DocumentChange(workflow, SUMMARY, summary))
        signature = self._signed.of_document(change)
        return {SUMMARY: change.data, **({} if signature is None else {SIGNATURE: signature})}

    def own_workflow(self, workflow: str, at: float) -> None:
        """Set the owner of its place in the index, by ETag, then that of its root.

        If the process dies in between, repeat the call.
        """
        if not self._owner.known:
            return
        call, row = TimeBudget(), _open(workflow, at)
        for partition, key in (
            (row["PartitionKey"], row["RowKey"]),
            (_partition(workflow, ROOT), ROW),
        ):
            while True:
                found = self._requests.read(call, partition, key)
                if found is None or (broker := broker_in(found)):
                    break
                place = {"PartitionKey": partition, "RowKey": key}
                self._requests.merge(call, {**place, **self._stamp}, _etag(found))
            if found is not None:
                self._check(workflow, broker)

    def unsigned_documents(self, workflow: str) -> list[str]:
        """The names of its documents that are not signed, or have such a piece: one query."""
        if not self._signed.takes_unsigned:
            return []
        first = _partition(workflow, "")
        values = {"first": first, "last": f"{first[:-1]}<"}
        text = "PartitionKey ge @first and PartitionKey lt @last"
        found = self._requests.query(TimeBudget(), text, values, DOCUMENTS)
        return [
            row["PartitionKey"].removeprefix(first)
            for row in found
            if SIGNATURE not in row or any(_signature(piece) not in row for piece in _pieces(row))
        ]

    def close_workflow(
        self, workflow: str, at: float, ended_at: float, summary: bytes = b""
    ) -> None:
        """List it as ended, then delete its place among the open ones."""
        call, row = TimeBudget(), _open(workflow, at)
        ended = self._ended(workflow, at, ended_at)
        self._requests.ensure(call, {**ended, **self._summary(workflow, summary)})
        self._requests.delete(call, row["PartitionKey"], row["RowKey"])

    def reopen_workflow(self, workflow: str, at: float, ended_at: float) -> None:
        """List it as open, then delete its place among the ended ones."""
        call = TimeBudget()
        self._requests.ensure(call, {**_open(workflow, at), **self._stamp})
        for row in (self._ended(workflow, at, ended_at), _ended(workflow, at, ended_at)):
            self._requests.delete(call, row["PartitionKey"], row["RowKey"])

    def open_workflows(self, limit: int, after: str = "") -> list[ListedWorkflow]:
        """Own open workflows in the order of their keys, those behind `after`."""
        behind = key_text(after) if after else ""
        own = " and broker eq @mine" if self._owner.known else ""
        values = {"key": behind, "mine": self._owner.broker}
        found = self._query("o", f"RowKey gt @key{own}", values, limit)
        return sorted(found, key=lambda listed: key_text(listed.workflow))[:limit]

    def ended_workflows(self, limit: int, before: float | None = None) -> list[ListedWorkflow]:
        """The newest own ended workflows, or those that ended before a time.

        With a time, those without an owner are among them, `UNFINISHED_SECONDS` later.
        """
        found = self._ended_of(self._owner.broker, limit, before)
        if before is not None and self._owner.known:
            found += self._ended_of("", limit, before - UNFINISHED_SECONDS)
        return heapq.nlargest(limit, found, key=attrgetter("ended_at"))

    def all_workflows(self, limit: int) -> list[ListedWorkflow]:
        """Workflows of all owners: open ones, and the newest of the ended ones."""
        found = self._query("o", "RowKey gt @key", {"key": ""}, limit, shown=True)
        owners = {each.broker for each in found} | {each.broker for each in self._registered()}
        ended = []
        for broker in owners | {self._owner.broker, ""}:
            ended += self._ended_of(broker, limit, None, shown=True)
        return found + heapq.nlargest(limit, ended, key=attrgetter("ended_at"))

    def _ended_of(
        self, broker: str, limit: int, before: float | None, *, shown: bool = False
    ) -> list[ListedWorkflow]:
        key = "" if before is None else count_down(before) + _END
        return self._query(_kind(broker), "RowKey gt @key", {"key": key}, limit, shown=shown)

    def _ended(self, workflow: str, at: float, ended_at: float) -> dict[str, Any]:
        """The row among the ended workflows of this owner."""
        return {**_ended(workflow, at, ended_at, self._owner.broker), **self._stamp}

    @property
    def _stamp(self) -> dict[str, Any]:
        """The property with the owner; none without one."""
        return {"broker": self._owner.broker} if self._owner.known else {}

    def _check(self, workflow: str, broker: str) -> None:
        """Raise ForeignId if the owner of a row is another one than this store's."""
        if is_foreign(self._owner, broker):
            raise foreign_id("workflow", workflow, broker, self._owner)

    def _query(
        self,
        kind: str,
        condition: str,
        values: Mapping[str, Any],
        limit: int,
        *,
        shown: bool = False,
    ) -> list[ListedWorkflow]:
        def page(call: TimeBudget, shard: int) -> list[dict[str, Any]]:
            text = f"PartitionKey eq @shard and {condition}"
            return self._requests.query(call, text, {"shard": f"{kind}-{shard}", **values}, limit)

        pages = self._requests.each(TimeBudget(), page, range(SHARDS))
        rows = [(row, self._listed(row)) for each in pages for row in each]
        found = [(row, listed) for row, listed in rows if listed is not None]
        if not shown:  # housekeeping looks at the roots themselves
            return [listed for _, listed in found]
        return [self._with_summary(row, listed) for row, listed in found]

    @staticmethod
    def _listed(row: Mapping[str, Any]) -> ListedWorkflow | None:
        """The workflow in a row of the index; None if another program wrote the row."""
        columns = Columns(row)
        try:
            workflow = columns.text("workflow")
            at, ended_at = columns.time("at"), columns.optional_time("ended_at")
            return ListedWorkflow(workflow, at, ended_at, columns.text("broker", missing=""))
        except Damaged:
            return None

    def _with_summary(self, row: Mapping[str, Any], listed: ListedWorkflow) -> ListedWorkflow:
        """The workflow with its summary, as far as that is believed: it hides no workflow."""
        columns = Columns(row)
        try:
            data, signature = columns.data(SUMMARY), columns.data(SIGNATURE)
        except Damaged:
            return listed
        if data is None or is_foreign(self._owner, listed.broker):
            return listed
        believed = self._signed.believed_copy((listed.workflow, SUMMARY), data, signature)
        return replace(listed, summary=believed)

    # -- owners ------------------------------------------------------------------------------

    def owners(self) -> set[Owner]:
        """Whose workflows there are: those that are open, or whose workers are registered."""
        listed = self._query("o", "RowKey gt @key", {"key": ""}, DOCUMENTS)
        return {Owner(each.broker) for each in listed if each.broker} | self._registered()

    def _registered(self) -> set[Owner]:
        rows = self._requests.query(
            TimeBudget(), "PartitionKey eq @owners", {"owners": OWNERS}, DOCUMENTS
        )
        return {Owner(broker) for row in rows if (broker := broker_in(row))}

    def unowned(self, before: float) -> int:
        """How many open workflows without an owner were started before a time."""
        listed = self._query("o", "RowKey gt @key", {"key": ""}, DOCUMENTS)
        return sum(not each.broker and each.at < before for each in listed)

    def adopt(self, old: Owner) -> int:
        """Make the workflows of another owner its own: documents, then places in the index.

        If the process dies in between, the next call continues; returns how many places it moved.
        """
        if not is_other_broker(self._owner, old):
            return 0
        self._set_owner("g-", "g.", old)
        moved = self._set_owner("o-", "o.", old)
        for shard in range(SHARDS):
            values = {"shard": f"{_kind(old.broker)}-{shard}"}
            while rows := self._requests.query(
                TimeBudget(), "PartitionKey eq @shard", values, BATCH
            ):
                self._requests.each(TimeBudget(), self._move, rows)
                moved += len(rows)
        return moved

    def _set_owner(self, first: str, last: str, old: Owner) -> int:
        """Set the owner of the rows of `old` in these partitions; returns how many."""
        text = "PartitionKey ge @first and PartitionKey lt @last and broker eq @old"
        values = {"first": first, "last": last, "old": old.broker}
        moved, after = 0, None
        while True:
            rows, after = self._requests.page(
                TimeBudget(), text, values, ("PartitionKey", "RowKey"), after
            )
            for row in rows:
                place = {name: row[name] for name in ("PartitionKey", "RowKey")}
                self._requests.add(TimeBudget(), {**place, **self._stamp})
            moved += len(rows)
            if after is None:
                return moved

    def _move(self, call: TimeBudget, row: Mapping[str, Any]) -> None:
        """Write the row of an ended workflow for this owner, then delete the other one."""
        listed = self._listed(row)
        if listed is not None and listed.ended_at is not None:
            now = self._ended(listed.workflow, listed.at, listed.ended_at)
            copy = {name: row[name] for name in (SUMMARY, SIGNATURE) if name in row}
            self._requests.ensure(call, {**now, **copy})
        self._requests.delete(call, row["PartitionKey"], row["RowKey"])

    # -- deletion ----------------------------------------------------------------------------

    def delete_workflow(self, listed: ListedWorkflow) -> bool:
        """Delete its documents, the root first, then its place in the index."""
        call = TimeBudget()
        first = _partition(listed.workflow, "")
        rows = self._requests.query(
            call,
            "PartitionKey ge @first and PartitionKey lt @last",
            {"first": first, "last": f"{first[:-1]}<"},
            DOCUMENTS,
            ("PartitionKey", "RowKey", "body_blob", "broker"),
        )
        rows = [row for row in rows if not is_foreign(self._owner, broker_in(row))]
        rows.sort(key=lambda row: row["PartitionKey"] != _partition(listed.workflow, ROOT))
        self._requests.each(call, self._delete, rows)
        row = _open(listed.workflow, listed.at)
        if listed.ended_at is not None:
            row = _ended(listed.workflow, listed.at, listed.ended_at, listed.broker)
        if not is_foreign(self._owner, self._broker_at(call, row)):
            self._requests.delete(call, row["PartitionKey"], row["RowKey"])
        return bool(rows)

    def _broker_at(self, call: TimeBudget, row: Mapping[str, Any]) -> str:
        """The owner in the index; only open workflows share their place with other owners."""
        if "ended_at" in row or not self._owner.known:
            return ""
        found = self._requests.read(call, row["PartitionKey"], row["RowKey"])
        return "" if found is None else broker_in(found)

    def _delete(self, call: TimeBudget, row: Mapping[str, Any]) -> None:
        self._requests.delete(call, row["PartitionKey"], row["RowKey"])
        blob = row.get("body_blob")
        if isinstance(blob, str):
            self._blobs.delete(blob)


def _partition(workflow: str, name: str) -> str:
    """The partition of one document. ``;`` is in no key text, so none is another's beginning."""
    return f"g-{key_text(workflow)};{name}"


def _pieces(entity: Mapping[str, Any]) -> list[str]:
    return sorted(name for name in entity if name.startswith(PIECE))


def _signature(piece: str) -> str:
    """The property with the signature of a piece."""
    return f"{SIGNATURE}_{piece.removeprefix(PIECE)}"


def _etag(entity: Mapping[str, Any]) -> str:
    return str(cast("Any", entity).metadata["etag"])


def _tag(etag: str, blob: str) -> str:
    return f"{etag}\n{blob}"


def _parts(tag: str | None) -> tuple[str, str]:
    etag, _, blob = (tag or "").partition("\n")
    return etag, blob


def _open(workflow: str, at: float) -> dict[str, Any]:
    key = key_text(workflow)
    return {
        "PartitionKey": f"o-{shard_of(key)}",
        "RowKey": key,
        "workflow": workflow,
        "at": float(at),
    }


def _kind(broker: str) -> str:
    """The beginning of the partitions with the ended workflows of an owner."""
    return f"em-{Owner(broker).mark}" if broker else "e"


def _ended(workflow: str, at: float, ended_at: float, broker: str = "") -> dict[str, Any]:
    key = key_text(workflow)
    return {
        "PartitionKey": f"{_kind(broker)}-{shard_of(key)}",
        "RowKey": f"{count_down(ended_at)}-{sha256(key.encode()).hexdigest()[:24]}",
        "workflow": workflow,
        "at": float(at),
        "ended_at": float(ended_at),
    }
