"""Changes of a workflow's documents, each decided anew from every version that is read."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

from aztask.stores.records.workflows import ROOT, DocumentChange
from aztask.support import chance
from aztask.workflows.bits import (
    INLINE_BYTES,
    FullRow,
    Join,
    MemberEnd,
    ParkedValue,
    Value,
    decided,
)
from aztask.workflows.documents import Appended
from aztask.workflows.graph import Root, read_root
from aztask.workflows.packing import pack_join, pack_late, pack_values, read_join
from aztask.workflows.plan import RUN, Layout, Node
from aztask.workflows.rows import JoinRow, empty_row, read_row

PIECES: Final = 32
PIECE_BYTES: Final = 1024
"""The most bits that are appended at once, and the bytes of each: a row of a table has 1 MiB."""

NEARLY_FULL: Final = 12
"""Members without a bit below which the writers of a row no longer wait for each other."""


def row_name(join: int, row: int) -> str:
    """The name of the document with a row of bits."""
    return f"bits-{join}-{row}"


def join_name(join: int) -> str:
    """The name of the document of a join with several rows."""
    return f"join-{join}"


def values_name(join: int, row: int, revision: int) -> str:
    """The name of the document with the values of a full row."""
    return f"row-{join}-{row}-{revision}"


@dataclass(slots=True)
class RowEdit:
    """Sets bits of one row. Afterwards it says whether the row is full, and what it holds.

    * `left`: how many members of the row had not ended when this process saw it last.
    * `tried`: the bits were appended, or that was tried.
    * `token`: names the decision, if this has made one.
    """

    workflow: str
    join: int
    number: int
    layout: Layout
    ends: list[MemberEnd]
    at: float
    passes_errors: bool
    row: JoinRow | None = None
    left: int = 0
    tried: bool = False
    token: str = ""
    parked: dict[int, tuple[Value, Value]] = field(default_factory=dict)
    documents: list[DocumentChange] = field(default_factory=list)

    @property
    def place(self) -> tuple[str, str]:
        """The workflow, and the name of the row's document."""
        return self.workflow, row_name(self.join, self.number)

    @property
    def decides(self) -> bool:
        """True if this has made the decision that the row holds."""
        decision = None if self.row is None else self.row.decision
        return decision is not None and bool(self.token) and decision.by == self.token

    @property
    def fresh(self) -> bool:
        """True if no earlier process can have begun to set one of its bits."""
        return bool(self.ends) and all(end.first for end in self.ends)

    @property
    def patient(self) -> bool:
        """True unless few members of the row are left: the last one should not wait."""
        return self.left > NEARLY_FULL

    def apply(self, data: bytes | None) -> bytes | None:
        """Set the bits; a single row that is full gets its decision in the same write."""
        members = self.layout.row_size(self.number)
        row = empty_row(members) if data is None else read_row(data, members)
        self.row, changed = row, False
        room = INLINE_BYTES - row.inline_bytes
        for end, value in self._values(room):
            changed |= row.set(self.layout.place(end.slot.member)[1], end, value)
        if self._undecided(row):
            whole, passes = [row.as_full("")], self.passes_errors
            self.token = self.token or chance.token()
            row.decision = decided(
                whole, passes_errors=passes, at=self.at, documents=False, by=self.token
            )
            row.outdated, changed = False, True
        return row.pack() if changed else None

    def _undecided(self, row: JoinRow) -> bool:
        return row.full and self.layout.rows == 1 and (row.decision is None or row.outdated)

    @property
    def exists(self) -> bool:
        """True for a row of a large join, see `aztask.workflows.starting`."""
        return self.layout.size >= RUN

    def pieces(self) -> Mapping[str, bytes]:
        """The bits as pieces: each small, of an end that is set for the first time."""
        if self.tried or len(self.ends) > PIECES:
            return {}
        self.tried = True
        found = {}
        for end in self.ends if self.fresh else ():
            index = self.layout.place(end.slot.member)[1]
            piece = pack_late(index, end)
            if len(piece) > PIECE_BYTES:
                return {}
            found[f"{index}_{end.node}_{end.generation}"] = piece
        return found

    def appended(self, data: bytes) -> Appended:
        """Note the row after the bits were appended to it."""
        row = self.row = read_row(data, self.layout.row_size(self.number))
        alone = row.left >= self.left - len(self.ends)
        return Appended(alone, not self._undecided(row), None if row.decision is not None else row)

    def _values(self, room: int) -> Iterable[tuple[MemberEnd, Value]]:
        """Each end with its value; those that do not fit are parked in one document."""
        inline = [each.value for each in self.ends if isinstance(each.value, bytes)]
        if sum(map(len, inline)) <= room:
            return [(each, each.value) for each in self.ends]
        if not self.parked:
            name = f"values-{self.join}-{self.number}-{chance.token()}"
            rows = [(each.value, None) for each in self.ends]
            self.documents.append(DocumentChange(self.workflow, name, pack_values(rows)))
            self.parked = {
                index: (each.value, ParkedValue(name, index))
                for index, each in enumerate(self.ends)
            }
        return [(each, self.parked[index][1]) for index, each in enumerate(self.ends)]

    def first(self) -> Sequence[DocumentChange]:
        """The document of parked values, once."""
        documents, self.documents = self.documents, []
        return documents

    def orphaned(self) -> None:
        """The workflow was deleted: its late members change nothing."""
        self.row = None


class _WrittenEdit:
    """An edit that cannot be appended: what it writes depends on what the document holds."""

    __slots__ = ()

    @property
    def exists(self) -> bool:
        """False: only an edit with pieces is asked."""
        return False

    def pieces(self) -> Mapping[str, bytes]:
        """None: it is never appended."""
        return {}

    def appended(self, data: bytes) -> Appended:
        """Nothing was appended, so all is left to write."""
        return Appended(alone=True, done=False)


@dataclass(slots=True)
class JoinEdit(_WrittenEdit):
    """Notes full rows of a join with several rows, and decides once all are full.

    `token`: names the decision, if this has made one.
    """

    workflow: str
    node: Node
    rows: dict[int, FullRow]
    at: float
    join: Join | None = None
    token: str = ""

    @property
    def decides(self) -> bool:
        """True if this has made the decision that the join holds."""
        decision = None if self.join is None else self.join.decision
        return decision is not None and bool(self.token) and decision.by == self.token

    @property
    def place(self) -> tuple[str, str]:
        """The workflow, and the name of the join's document."""
        return self.workflow, join_name(self.node.number)

    @property
    def patient(self) -> bool:
        """False: what follows waits for it."""
        return False

    def apply(self, data: bytes | None) -> bytes | None:
        """Note the rows; the last one decides."""
        rows = self.node.rows
        join = Join([None] * rows) if data is None else read_join(data, rows)
        self.join, changed = join, False
        for number, row in self.rows.items():
            changed |= join.set(number, row)
        full = [row for row in join.rows if row is not None]
        if len(full) == rows and join.decision is None:
            self.token = self.token or chance.token()
            join.decision = decided(
                full,
                passes_errors=self.node.passes_errors,
                at=self.at,
                documents=True,
                by=self.token,
            )
            changed = True
        return pack_join(join) if changed else None

    def first(self) -> Sequence[DocumentChange]:
        """Nothing: the rows' values are written already."""
        return ()

    def orphaned(self) -> None:
        """The workflow was deleted: its rows decide nothing."""
        self.join = None


@dataclass(slots=True)
class RootEdit(_WrittenEdit):
    """Changes the root of a workflow. `before`, `root`: the root before and after the change."""

    workflow: str
    change: Callable[[Root], Root]
    before: Root | None = None
    root: Root | None = None

    @property
    def place(self) -> tuple[str, str]:
        """The workflow, and the name of its root."""
        return self.workflow, ROOT

    @property
    def patient(self) -> bool:
        """False: what follows waits for it."""
        return False

    def apply(self, data: bytes | None) -> bytes | None:
        """The changed root; None if the workflow does not exist or nothing changes."""
        if data is None:
            return None
        self.before = read_root(data)
        self.root = self.change(self.before)
        return None if self.root == self.before else self.root.pack()

    def first(self) -> Sequence[DocumentChange]:
        """Nothing: a root refers to no new document."""
        return ()

    def orphaned(self) -> None:
        """The workflow does not exist."""
        self.root = None
