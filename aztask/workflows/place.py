"""A message's place in its workflow, as the signed header ``aztask-node`` carries it.

The place says everything that a worker needs to set the member's bit, so that the usual end of a
member reads nothing of the graph. Its text is ``NODE:JOIN:MEMBER:SIZE:TAKES:FLAGS``, with empty
parts for what does not apply.
"""

from __future__ import annotations

import re
from typing import Final, NamedTuple

from aztask.errors import DecodeError
from aztask.workflows.plan import GraphPlan, JoinSlot, Node

_TEXT: Final = re.compile(
    r"(\d{1,9}):(?:(\d{1,9}):(\d{1,9}):(\d{1,9})|::):(\d{0,9}):([ecpb]{0,4})", re.ASCII
)


class NodePlace(NamedTuple):
    """The place of one task. (A tuple is made in a fifth of a frozen dataclass's time.)

    * `node`: its node number.
    * `slot`: the bit that its end sets, None for a task of `on_error`; `size`: the members of that
      join.
    * `takes`: the node whose value is its first argument; `takes_errors`: whose failures are.
    * `continues`: other nodes start when it succeeds, so that its success sets no bit.
    * `passes_errors`, `blocked`: what the join's `Node` says of them.
    """

    node: int
    slot: JoinSlot | None = None
    size: int = 0
    takes: int | None = None
    takes_errors: bool = False
    continues: bool = False
    passes_errors: bool = False
    blocked: bool = False

    @classmethod
    def of(cls, plan: GraphPlan, node: Node) -> NodePlace:
        """The place of a node of the plan."""
        errors, continues = node.slot is None, bool(node.next)
        if node.slot is None:
            return cls(node.number, None, 0, node.takes, errors, continues)
        join, slot = plan.nodes[node.slot.join], node.slot
        return cls(
            node.number,
            slot,
            join.size,
            node.takes,
            errors,
            continues,
            join.passes_errors,
            join.blocked,
        )

    @classmethod
    def read(cls, text: str) -> NodePlace:
        """The place in a header's text. Raises DecodeError."""
        found = _TEXT.fullmatch(text)
        if found is None:
            raise DecodeError("aztask-node is not a place in a workflow; update aztask")
        node, join, member, size, takes, flags = found.groups()
        slot = None if join is None else JoinSlot(int(join), int(member))
        if slot is not None and slot.member >= int(size):
            raise DecodeError("aztask-node names a member that its group does not have")
        return cls(
            int(node),
            slot,
            int(size or 0),
            int(takes) if takes else None,
            "e" in flags,
            "c" in flags,
            "p" in flags,
            "b" in flags,
        )

    def __str__(self) -> str:
        slot = "::" if self.slot is None else f"{self.slot.join}:{self.slot.member}:{self.size}"
        takes = "" if self.takes is None else self.takes
        flags = "e" * self.takes_errors + "c" * self.continues
        flags += "p" * self.passes_errors + "b" * self.blocked
        return f"{self.node}:{slot}:{takes}:{flags}"
