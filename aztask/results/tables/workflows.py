"""Workflows in Azure Tables: their documents, and the index of open and ended ones.

Partitions
* ``g-WORKFLOW;DOCUMENT``: one document, in its only row ``d``. A long document is in a blob. An
  appended piece is a property of its own, ``piece_NAME``, which a merge sets without a condition.
* ``o-SHARD``: open workflows.
* ``e-SHARD``: ended workflows; their row keys count down, so that the newest come first.
"""

from __future__ import annotations

import heapq
from collections.abc import Mapping, Sequence
from hashlib import sha256
from operator import attrgetter
from typing import Any, Final, cast

from aztask.results.damage import Columns, Damaged
from aztask.results.tables.blobs import Blobs
from aztask.results.tables.client import TableRequests, TimeBudget
from aztask.results.tables.errors import OutcomeUnknown, RowNotFound
from aztask.results.tables.index import count_down
from aztask.results.tables.names import SHARDS, key_text, shard_of
from aztask.results.workflows import ROOT, Addition, Change, Document, Listed

ROW: Final = "d"
BATCH: Final = 256
DOCUMENTS: Final = 100_000
PIECE: Final = "piece_"

_END: Final = "~"


class TablesWorkflows:
    """The implementation of `aztask.results.workflows.WorkflowStore` in a table."""

    def __init__(self, requests: TableRequests, blobs: Blobs) -> None:
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
            try:
                return self._document(call, entity)
            except RowNotFound:
                continue  # it was replaced after we read it, and its blob deleted
            except Damaged:
                break
        return Document(b"", "")

    def _document(self, call: TimeBudget, entity: Mapping[str, Any]) -> Document:
        """Raises Damaged, and RowNotFound if its blob is missing."""
        columns = Columns(entity)
        blob = columns.text("body_blob", missing="")
        data = self._blobs.load(call, columns.data("data"), blob) or b""
        names = _pieces(entity)
        pieces = [columns.data(name) or b"" for name in names]
        return Document(b"".join([data, *pieces]), _tag(_etag(entity), blob), len(names))

    def write(self, changes: Sequence[Change]) -> list[str | None]:
        """Make each change, in parallel; each costs one request, and one more for a long one."""
        tags: list[str | None] = []
        for first in range(0, len(changes), BATCH):
            part = changes[first : first + BATCH]
            tags += self._requests.each(TimeBudget(), self._write, part)
        return tags

    def _write(self, call: TimeBudget, change: Change) -> str | None:
        partition = _partition(change.workflow, change.name)
        data, blob = self._blobs.place_at(call, partition, ROW, change.data)
        entity: dict[str, Any] = {"PartitionKey": partition, "RowKey": ROW}
        entity.update({"body_blob": blob} if blob else {"data": data})
        old_etag, old_blob = _parts(change.tag)
        try:
            if change.tag is None:
                etag = self._requests.insert(call, entity)
            else:
                etag = self._requests.replace(call, entity, old_etag)
        except OutcomeUnknown:
            etag = self._written(call, entity)
        if etag is None:
            self._blobs.delete(blob)
            return None
        self._blobs.delete(old_blob)
        return _tag(etag, blob)

    def append(self, additions: Sequence[Addition]) -> list[Document | None]:
        """Append pieces, in parallel; each costs two requests, however many writers there are."""
        found: list[Document | None] = []
        for first in range(0, len(additions), BATCH):
            part = additions[first : first + BATCH]
            found += self._requests.each(TimeBudget(), self._append, part)
        return found

    def _append(self, call: TimeBudget, addition: Addition) -> Document | None:
        partition = _partition(addition.workflow, addition.name)
        pieces = {f"{PIECE}{name}": data for name, data in addition.pieces.items()}
        entity = {"PartitionKey": partition, "RowKey": ROW, **pieces}
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

    def announce(self, workflow: str, at: float) -> None:
        """List it as open since `at`, unless it is listed."""
        self._requests.ensure(TimeBudget(), _open(workflow, at))

    def close_workflow(self, workflow: str, at: float, ended_at: float) -> None:
        """List it as ended, then delete its place among the open ones."""
        call, row = TimeBudget(), _open(workflow, at)
        self._requests.ensure(call, _ended(workflow, at, ended_at))
        self._requests.delete(call, row["PartitionKey"], row["RowKey"])

    def reopen_workflow(self, workflow: str, at: float, ended_at: float) -> None:
        """List it as open, then delete its place among the ended ones."""
        call, row = TimeBudget(), _ended(workflow, at, ended_at)
        self._requests.ensure(call, _open(workflow, at))
        self._requests.delete(call, row["PartitionKey"], row["RowKey"])

    def open_workflows(self, limit: int, after: str = "") -> list[Listed]:
        """Open workflows in the order of their keys, those behind `after`."""
        behind = key_text(after) if after else ""
        found = self._query("o", "RowKey gt @key", {"key": behind}, limit)
        return sorted(found, key=lambda listed: key_text(listed.workflow))[:limit]

    def ended_workflows(self, limit: int, before: float | None = None) -> list[Listed]:
        """The newest ended workflows, or those that ended before a time."""
        key = "" if before is None else count_down(before) + _END
        found = self._query("e", "RowKey gt @key", {"key": key}, limit)
        return heapq.nlargest(limit, found, key=attrgetter("ended_at"))

    def _query(
        self, kind: str, condition: str, values: Mapping[str, Any], limit: int
    ) -> list[Listed]:
        def page(call: TimeBudget, shard: int) -> list[dict[str, Any]]:
            text = f"PartitionKey eq @shard and {condition}"
            return self._requests.query(call, text, {"shard": f"{kind}-{shard}", **values}, limit)

        pages = self._requests.each(TimeBudget(), page, range(SHARDS))
        rows = [_listed(row) for each in pages for row in each]
        return [listed for listed in rows if listed is not None]

    def delete_workflow(self, listed: Listed) -> bool:
        """Delete its documents, the root first, then its place in the index."""
        call = TimeBudget()
        first = _partition(listed.workflow, "")
        rows = self._requests.query(
            call,
            "PartitionKey ge @first and PartitionKey lt @last",
            {"first": first, "last": f"{first[:-1]}<"},
            DOCUMENTS,
            ("PartitionKey", "RowKey", "body_blob"),
        )
        rows.sort(key=lambda row: row["PartitionKey"] != _partition(listed.workflow, ROOT))
        self._requests.each(call, self._delete, rows)
        row = _open(listed.workflow, listed.at)
        if listed.ended_at is not None:
            row = _ended(listed.workflow, listed.at, listed.ended_at)
        self._requests.delete(call, row["PartitionKey"], row["RowKey"])
        return bool(rows)

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


def _ended(workflow: str, at: float, ended_at: float) -> dict[str, Any]:
    key = key_text(workflow)
    return {
        "PartitionKey": f"e-{shard_of(key)}",
        "RowKey": f"{count_down(ended_at)}-{sha256(key.encode()).hexdigest()[:24]}",
        "workflow": workflow,
        "at": float(at),
        "ended_at": float(ended_at),
    }


def _listed(row: Mapping[str, Any]) -> Listed | None:
    """The workflow in a row of the index; None if another program wrote the row."""
    columns = Columns(row)
    try:
        return Listed(
            columns.text("workflow"), columns.time("at"), columns.optional_time("ended_at")
        )
    except Damaged:
        return None
