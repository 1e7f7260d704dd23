"""A compiled graph: flat nodes, each a task to send or a join that waits for its members.

Rules
1. Node 0 is the root: a join of one member, the whole graph. It has no slot.
2. Every other node works for one slot, a member of a join. Only one node of a slot is under way at
   a time, and the numbers of a slot's nodes rise in the order in which they run.
3. A node that succeeds starts the nodes in `Node.next`; without any, its value fills its slot. A
   node that fails fills its slot with the failure.
4. Node numbers are deterministic, so ``WORKFLOW.NUMBER`` is the same task id at every try.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Final, NamedTuple

import msgpack

ROOT: Final = 0
ROW: Final = 512
"""Members whose bits are in one row of a large join, in a store that is reached over a network."""

RUN: Final = 16
"""Neighbouring members whose bits are in one row there: a worker that takes 16 members from the
queue and ends them together writes one row or two."""

SPREAD_ROWS: Final = 4
SPREAD: Final = 64
"""A join has a row for each 64 members up to four rows, so that its writers seldom meet."""

BLOCK: Final = 128
"""Members of a row in a local file, where a small row is written faster than a large one."""

_UNPACKED_BYTES: Final = 256 * 1024 * 1024


class JoinSlot(NamedTuple):
    """A member of a join: the join's node number, and the member's number in it."""

    join: int
    member: int


@dataclass(frozen=True, slots=True)
class Layout:
    """Where the bits of `size` members are. A change makes open workflows unreadable.

    Runs of `RUN` members go to the rows in turn: the workers of a group, which take its members in
    order, write to different rows, and the members that one worker ends together are in few rows.
    If it is `blocked`, as in a local file, where writers take turns anyway, member i is in row
    i div `BLOCK`: ends that come together then change one small row.
    """

    size: int
    blocked: bool = False

    @property
    def rows(self) -> int:
        """How many rows there are: at least 1."""
        if self.blocked:
            return max(1, -(-self.size // BLOCK))
        rows = max(-(-self.size // ROW), min(SPREAD_ROWS, self.size // SPREAD))
        return max(1, min(rows, -(-self.size // RUN)))

    def place(self, member: int) -> tuple[int, int]:
        """The row of a member, and its index in the row."""
        if self.blocked:
            return divmod(member, BLOCK)
        run, place = divmod(member, RUN)
        turn, row = divmod(run, self.rows)
        return row, turn * RUN + place

    def members(self, row: int) -> list[int]:
        """The members of a row, in the order of their indexes in it."""
        length, step = (BLOCK, self.size or 1) if self.blocked else (RUN, self.rows * RUN)
        firsts = range(row * length, self.size, step)
        return [each for first in firsts for each in range(first, min(self.size, first + length))]

    def row_size(self, row: int) -> int:
        """How many members are in that row."""
        if self.blocked:
            return max(0, min(BLOCK, self.size - row * BLOCK))
        whole, rest = divmod(self.size, self.rows * RUN)
        return whole * RUN + max(0, min(RUN, rest - row * RUN))


class Node(NamedTuple):
    """One node. A task has a name in `task`; a join has "" there.

    * `slot`: the member that it works for; None for the root and for a task of `on_error`.
    * `takes`: the node whose value is its first argument, or None.
    * `next`: the nodes that start when it succeeds.
    * `size`: members of a join; `single`: its value is that of its only member, not a list.
    * `passes_errors`: the join succeeds although members fail.
    * `on_error`: the task that is sent when the join fails.
    * `blocked`: see `Layout`; the same for all joins of a plan.
    """

    number: int
    slot: JoinSlot | None = None
    takes: int | None = None
    next: tuple[int, ...] = ()
    task: str = ""
    queue: str = ""
    size: int = 0
    single: bool = False
    passes_errors: bool = False
    on_error: int | None = None
    blocked: bool = False

    @property
    def layout(self) -> Layout:
        """Where the bits of a join's members are."""
        return Layout(self.size, self.blocked)

    @property
    def rows(self) -> int:
        """How many rows hold the bits of a join's members: at least 1."""
        return self.layout.rows


@dataclass(frozen=True)
class GraphPlan:
    """All nodes in order, and those that start at once."""

    nodes: tuple[Node, ...]
    entries: tuple[int, ...]

    @cached_property
    def in_slots(self) -> dict[JoinSlot, tuple[Node, ...]]:
        """The nodes of each slot, in the order in which they run."""
        found: dict[JoinSlot, list[Node]] = {}
        for node in self.nodes:
            if node.slot is not None:
                found.setdefault(node.slot, []).append(node)
        return {slot: tuple(nodes) for slot, nodes in found.items()}

    @cached_property
    def before(self) -> dict[int, int]:
        """The node that each node follows; those that start at once are not in it."""
        return {number: node.number for node in self.nodes for number in node.next}

    @property
    def tasks(self) -> int:
        """How many tasks it sends if all goes well; those of `on_error` do not count."""
        return sum(bool(node.task) and node.slot is not None for node in self.nodes)

    def pack(self) -> bytes:
        """The plan as bytes: some bytes for each node, as most nodes of a graph are alike."""
        names = sorted({(node.task, node.queue) for node in self.nodes})
        numbers = {name: number for number, name in enumerate(names)}
        rows = [_row(node, numbers[node.task, node.queue]) for node in self.nodes]
        return zlib.compress(msgpack.packb([names, self.entries, rows]))


def task_id_of(workflow: str, node: int) -> str:
    """The task id of a node, the same at every try."""
    return f"{workflow}.{node}"


def unpack(data: bytes) -> GraphPlan:
    """The plan that `GraphPlan.pack` wrote. Raises ValueError for anything else."""
    try:
        reader = zlib.decompressobj()
        unpacked = reader.decompress(data, _UNPACKED_BYTES)
        if not reader.eof:
            raise ValueError("it is incomplete or too long")
        names, entries, rows = msgpack.unpackb(unpacked)
        nodes = tuple(_node(number, row, names) for number, row in enumerate(rows))
        plan = GraphPlan(nodes, _numbers(entries, len(nodes)))
        for node in nodes:
            _check(node, nodes)
    except (zlib.error, msgpack.UnpackException, TypeError, IndexError, AttributeError) as error:
        raise ValueError(str(error)) from None
    return plan


def _row(node: Node, name: int) -> list[Any]:
    slot = [] if node.slot is None else [node.slot.join, node.slot.member]
    flags = node.single | node.passes_errors << 1 | node.blocked << 2
    return [name, slot, node.takes, _ranges(node.next), node.size, flags, node.on_error]


def _node(number: int, row: Sequence[Any], names: Sequence[Any]) -> Node:
    name, slot, takes, following, size, flags, on_error = row
    task, queue = names[name]
    if not isinstance(task, str) or not isinstance(queue, str):
        raise TypeError("a task's name is no text")
    return Node(
        number,
        JoinSlot(*slot) if slot else None,
        takes,
        tuple(n for first, count in following for n in range(first, first + count)),
        task,
        queue,
        size,
        bool(flags & 1),
        bool(flags & 2),
        on_error,
        bool(flags & 4),
    )


def _check(node: Node, nodes: Sequence[Node]) -> None:
    """Raise IndexError, TypeError or ValueError for a number that no compiler writes."""
    if node.next or node.takes is not None or node.on_error is not None:
        numbers = [*node.next, *(n for n in (node.takes, node.on_error) if n is not None)]
        _numbers(numbers, len(nodes))
    if isinstance(node.size, bool) or not isinstance(node.size, int) or node.size < 0:
        raise ValueError("a join's size is no number")
    if node.slot is not None and not 0 <= node.slot.member < nodes[node.slot.join].size:
        raise ValueError("a slot is not in its join")
    if node.slot is None and not node.task and node.number != ROOT:
        raise ValueError("a join has no slot")


def _numbers(found: Iterable[Any], count: int) -> tuple[int, ...]:
    numbers = tuple(found)
    if not all(type(number) is int and 0 <= number < count for number in numbers):
        raise ValueError("a node's number is not in the plan")
    return numbers


def _ranges(numbers: Sequence[int]) -> list[list[int]]:
    """Ascending numbers as [first, count] of each run without a gap."""
    found: list[list[int]] = []
    for number in numbers:
        if found and number == sum(found[-1]):
            found[-1][1] += 1
        else:
            found.append([number, 1])
    return found
