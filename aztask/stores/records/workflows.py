"""The optional protocol of result stores that keep workflows: documents, and an index of them.

A workflow is a set of named documents. What is in them is the business of `aztask.workflows`.

Rules
1. Every write of a document is compare-and-set: it names the tag that was read, or None for a
   document that must not exist yet. Pieces can be appended without that. Documents of one workflow
   are in partitions of their own, so that writers of different documents never conflict.
2. A workflow is announced in the index before its first document is written, and its document
   `ROOT` is written last. Documents of an announced workflow without a root were left behind by a
   sender that died.
3. A store that shares a file with the broker writes documents in the caller's transaction.
4. A workflow belongs to the broker that its messages are sent to (`aztask.address.owner`). Reading,
   writing or announcing one of another owner raises ForeignId, and its documents are never deleted.
   One without an owner can be read by everyone; `own_workflow` adopts it.
5. An unreachable store raises BrokerUnavailable; some of the changes of the call may have been
   made then.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final, Protocol

ROOT: Final = "root"
"""The document that commits a workflow. Names consist of letters, digits, ``.`` and ``-``."""


@dataclass(frozen=True, slots=True)
class Document:
    """A document as it was read: what was written, and behind it all pieces that were appended.

    `tag`: names this version of it. `pieces`: how many were appended since the last write.
    `broker`: whose it is; "" if that is not known (rule 4).

    `refused`: why it, or one of its pieces, is damaged or not rightly signed; "" if all is well.
    Such a document has no data, and such a piece is skipped.
    """

    data: bytes
    tag: str
    pieces: int = 0
    broker: str = ""
    refused: str = ""


@dataclass(frozen=True, slots=True)
class DocumentChange:
    """A new version of a document. `tag`: the version that it replaces; None: there is none."""

    workflow: str
    name: str
    data: bytes
    tag: str | None = None


@dataclass(frozen=True, slots=True)
class Addition:
    """Pieces to append to a document, by name. Names consist of letters, digits and ``_``."""

    workflow: str
    name: str
    pieces: Mapping[str, bytes]


@dataclass(frozen=True, slots=True)
class ListedWorkflow:
    """A workflow in the index. Times are UTC epoch seconds; `ended_at` is None while it is open.

    `broker`: whose it is; "" if that is not known.

    `summary`: what was given as it was listed, for those who show it; b"" if there is none, or it
    is not believed.
    """

    workflow: str
    at: float
    ended_at: float | None = None
    broker: str = ""
    summary: bytes = b""


def workflow_of(task_id: str) -> str | None:
    """The workflow that a task id may belong to: a node's task id is ``WORKFLOW.NUMBER``."""
    workflow, dot, number = task_id.rpartition(".")
    return workflow if dot and workflow and number.isascii() and number.isdigit() else None


class WorkflowStore(Protocol):
    """Keeps workflows. Any thread may call."""

    def announce(self, workflow: str, at: float, summary: bytes = b"") -> None:
        """List it as open since `at`, unless it is listed.

        summary: see `ListedWorkflow`. A store on this machine, which reads many documents at once,
        keeps none, here and below.
        """
        ...

    def describe(self, workflow: str, at: float, summary: bytes) -> None:
        """Give it another summary, if it is listed as open since `at`."""
        ...

    def own_workflow(self, workflow: str, at: float) -> None:
        """Adopt a workflow without an owner, if it is listed as open (rule 4). `at`: of its root.

        Of two owners, the one that is first at its place in the index has it; the other one gets
        ForeignId. If the process dies in between, repeat the call.
        """
        ...

    def read(self, names: Sequence[tuple[str, str]]) -> list[Document | None]:
        """The documents with these names, each (workflow, document); None for missing ones."""
        ...

    def write(self, changes: Sequence[DocumentChange]) -> list[str | None]:
        """Make each change; returns the new tags, and None where the tag was not the current one.

        Each change succeeds or fails alone.
        """
        ...

    def append(self, additions: Sequence[Addition]) -> list[Document | None]:
        """Append pieces, whatever other writers do; returns the documents as they are after that.

        No other writer makes this fail, and it makes a write under an older tag fail: of two
        processes that append, the later one finds the pieces of both. A repeated piece may be in
        the document twice, and pieces are in any order. The next write replaces data and pieces.

        None: nothing was appended, because the document does not exist or has too many pieces.
        """
        ...

    def unsigned_documents(self, workflow: str) -> list[str]:
        """The names of its documents that are not signed, wholly or in part, and are obeyed.

        None without signing keys, and none once ``old_signatures`` is False.
        """
        ...

    def close_workflow(
        self, workflow: str, at: float, ended_at: float, summary: bytes = b""
    ) -> None:
        """List it as ended. Repeating this changes nothing.

        If the process dies in between, it may be listed twice; repeat the call.
        """
        ...

    def reopen_workflow(self, workflow: str, at: float, ended_at: float) -> None:
        """List it as open again; the times are those it was listed with."""
        ...

    def open_workflows(self, limit: int, after: str = "") -> list[ListedWorkflow]:
        """Own open workflows in a fixed order, those behind the workflow `after`."""
        ...

    def ended_workflows(self, limit: int, before: float | None = None) -> list[ListedWorkflow]:
        """Own ended workflows: the newest first, or with `before` only those that ended earlier.

        With `before`, also those without an owner that ended `UNFINISHED_SECONDS` before that.
        """
        ...

    def all_workflows(self, limit: int) -> list[ListedWorkflow]:
        """Workflows of all owners: open ones, and the newest ended ones, `limit` of each."""
        ...

    def delete_workflow(self, listed: ListedWorkflow) -> bool:
        """Delete its documents, then its place in the index; False if it had no document.

        If the process dies in between, repeat the call.
        """
        ...


def workflows_of(results: object) -> WorkflowStore | None:
    """The store's workflows; None if there is no store, or if it keeps none."""
    found: WorkflowStore | None = getattr(results, "workflows", None)
    return found
