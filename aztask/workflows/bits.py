"""The bits of a join: its members' ends in rows, and the decision once all have ended.

Rules
1. `aztask.workflows.plan.Layout` says which row has the bit of a member.
2. An end changes a bit only if its version (node, generation) is later than that of the bit.
   Every such change after the first raises the revision of the row.
3. With one row, the row holds the decision too. With more, the join's document says which rows are
   full, and holds the decision.
4. Bits that were appended to a row, see `aztask.workflows.documents`, count like those in it. Only
   an end that no process can have begun to set before is appended: a lower version of a bit is
   there before a higher one, so that all readers find the same revision.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final, NamedTuple, TypeAlias

from aztask.stores.records.base import State
from aztask.workflows.plan import JoinSlot, Layout

INLINE_BYTES: Final = 40_000
"""Bytes of values that a row holds itself; more values are in documents of their own."""

FAILURES: Final = 20
"""Failures that a decision lists; of more it has the number."""

NIL: Final = b"\xc0"


@dataclass(frozen=True, slots=True)
class ParkedValue:
    """A value in a document of values: the document's name, and the index in it."""

    document: str
    index: int


@dataclass(frozen=True, slots=True)
class OfJoin:
    """The value of a join that has succeeded."""

    join: int


Value: TypeAlias = bytes | ParkedValue | OfJoin
"""An encoded value, or a reference to one."""


@dataclass(frozen=True, slots=True)
class Failure:
    """Why a task, or a join with failed members, did not succeed."""

    node: int
    state: State
    error_type: str = ""
    error: str = ""


class MemberEnd(NamedTuple):
    """The end of a member of a join of `size` members.

    * `node`, `generation`: its version (rule 2).
    * `value`: of a success; `failures`: of any other state, at least one.
    * `passes_errors`, `blocked`: what the join's `Node` says of them.
    * `first`: no earlier process can have begun to set this end.
    """

    slot: JoinSlot
    size: int
    node: int
    generation: int
    state: State
    value: Value = NIL
    failures: tuple[Failure, ...] = ()
    passes_errors: bool = False
    blocked: bool = False
    first: bool = False

    @property
    def layout(self) -> Layout:
        """Where the bits of its join are."""
        return Layout(self.size, self.blocked)


@dataclass(frozen=True, slots=True)
class Decision:
    """How a join ended.

    * `generation`: how often bits were changed before it.
    * `failed`: how many members did not succeed; `failures`: the first ones.
    * `values`: the documents with the rows' values, if the join has several rows.
    * `by`: names the change that has decided, so that its process knows that it is to act on this.
    """

    state: State
    generation: int
    at: float
    failed: int = 0
    failures: tuple[Failure, ...] = ()
    values: tuple[str, ...] = ()
    by: str = ""


@dataclass(slots=True)
class Bit:
    """One member's bit, once it has ended."""

    state: State
    node: int
    generation: int
    revision: int
    value: Value | None = None
    failures: tuple[Failure, ...] = ()


@dataclass(slots=True)
class FullRow:
    """A full row as its join's document has it."""

    revision: int
    failed: int
    values: str
    failures: list[Failure] = field(default_factory=list)


@dataclass(slots=True)
class Join:
    """The document of a join with several rows: the full ones, and the decision."""

    rows: list[FullRow | None]
    decision: Decision | None = None

    def set(self, number: int, row: FullRow) -> bool:
        """Note a full row; False if that changes nothing."""
        if self.decision is not None and self.decision.state is State.SUCCEEDED:
            return False
        old = self.rows[number]
        if old is not None and old.revision >= row.revision:
            return False
        self.rows[number] = row
        self.decision = None
        return True


def decided(
    rows: Sequence[FullRow], *, passes_errors: bool, at: float, documents: bool, by: str
) -> Decision:
    """The decision of a join whose rows are all full.

    * `documents`: its values are in documents, one for each row.
    * `by`: see `Decision`.
    """
    failed = sum(row.failed for row in rows)
    failures = [failure for row in rows for failure in row.failures][:FAILURES]
    state = State.SUCCEEDED
    if failed and not passes_errors:
        cancelled = all(each.state is State.CANCELLED for each in failures)
        state = State.CANCELLED if cancelled else State.FAILED
    names = tuple(row.values for row in rows) if documents else ()
    generation = sum(row.revision for row in rows)
    return Decision(state, generation, at, failed, tuple(failures), names, by)
