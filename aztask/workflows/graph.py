"""What is stored of one workflow beside its bits: the root, the plan, and the nodes' messages.

Rules
1. Plan and messages are written once, under names with the starter's token: two senders of one
   workflow id never mix their parts. The root names the token.
2. A message is stored as its starter signed it. Whether it is delayed, and when it expires, are
   headers of it (`DELAY`, `EXPIRES`), because both count from the time at which it is sent.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from threading import Lock
from typing import Any, Final, TypeVar

import msgpack

from aztask.errors import DecodeError
from aztask.message.envelope import Envelope
from aztask.queues.local.payload import envelope_of, payload_of
from aztask.stores.records.base import State
from aztask.stores.records.damage import Columns, Damaged
from aztask.stores.records.workflows import ROOT, DocumentChange, WorkflowStore
from aztask.support.clock import Clock
from aztask.workflows.plan import GraphPlan, unpack

DELAY: Final = "aztask-node-delay"
EXPIRES: Final = "aztask-node-expires"
"""Headers of a stored message: seconds from its send."""

PART_BYTES: Final = 48 * 1024
PART_NODES: Final = 500
REMEMBERED: Final = 64
CHECK_SECONDS: Final = 2.0
"""How long a worker may go on before it notices that a workflow was cancelled."""

VERSION: Final = 1

Kept = TypeVar("Kept")


@dataclass(frozen=True, slots=True)
class Root:
    """The document that commits a workflow. Times are UTC epoch seconds.

    * `token`: names the starter's documents; `parts`: the first node of each part.
    * `starting_until`: until then its sender, or the worker that took over, sends the first nodes;
      None once they are sent.
    * `cancelled_at`: when it was cancelled, or None.
    * `ended_at`, `state`: how the workflow ended; None and STARTED before.
    """

    at: float
    token: str
    tasks: int
    parts: tuple[int, ...] = ()
    starting_until: float | None = None
    cancelled_at: float | None = None
    ended_at: float | None = None
    state: State = State.STARTED

    def pack(self) -> bytes:
        """The root as bytes; `read_root` reads them."""
        packed: bytes = msgpack.packb(
            {
                "v": VERSION,
                "at": self.at,
                "token": self.token,
                "tasks": self.tasks,
                "parts": self.parts,
                "starting_until": self.starting_until,
                "cancelled_at": self.cancelled_at,
                "ended_at": self.ended_at,
                "state": self.state.value,
            }
        )
        return packed

    def summary(self) -> bytes:
        """What a list shows of it, as `pack`."""
        return replace(self, token="", parts=(), starting_until=None).pack()


def read_root(data: bytes) -> Root:
    """The root that `Root.pack` wrote. Raises Damaged."""
    columns = Columns({"root": data})
    found = columns.unpacked("root")
    if not isinstance(found, dict) or found.get("v") != VERSION:
        raise Damaged("the root of a workflow is unknown or wrong; a newer aztask may know it")
    fields = Columns(found)
    parts = found.get("parts")
    if not isinstance(parts, list) or not all(type(each) is int for each in parts):
        raise Damaged("the root of a workflow lists no parts")
    return Root(
        fields.time("at"),
        fields.text("token"),
        fields.count("tasks"),
        tuple(parts),
        fields.optional_time("starting_until"),
        fields.optional_time("cancelled_at"),
        fields.optional_time("ended_at"),
        fields.state(),
    )


def part_documents(
    workflow: str, token: str, plan: GraphPlan, envelopes: Iterable[tuple[int, str, Envelope]]
) -> tuple[list[DocumentChange], tuple[int, ...]]:
    """The documents of plan and messages, and the first node of each part.

    * `envelopes`: (node, queue, envelope) by rising node numbers. Raises EncodeError.
    """
    changes = [DocumentChange(workflow, _plan_name(token), plan.pack())]
    firsts: list[int] = []
    rows: list[Any] = []
    size = 0
    for node, queue, envelope in envelopes:
        payload = payload_of(envelope)
        if rows and (size + len(payload) > PART_BYTES or len(rows) >= PART_NODES):
            changes.append(_part(workflow, token, len(firsts) - 1, rows))
            rows, size = [], 0
        if not rows:
            firsts.append(node)
        rows.append([node, queue, payload])
        size += len(payload)
    if rows:
        changes.append(_part(workflow, token, len(firsts) - 1, rows))
    return changes, tuple(firsts)


def _part(workflow: str, token: str, number: int, rows: list[Any]) -> DocumentChange:
    return DocumentChange(workflow, _part_name(token, number), msgpack.packb(rows))


def _plan_name(token: str) -> str:
    return f"plan-{token}"


def _part_name(token: str, number: int) -> str:
    return f"part-{token}-{number}"


def is_part(name: str) -> bool:
    """True for a document with messages."""
    return name.startswith("part-")


def pack_messages(rows: Iterable[tuple[int, str, Envelope]]) -> bytes:
    """A document with messages, each (node, queue, envelope); `read_messages` reads it."""
    packed: bytes = msgpack.packb([[node, queue, payload_of(each)] for node, queue, each in rows])
    return packed


def split_extra(extra: Any) -> tuple[dict[str, Any], float, float | None]:
    """The headers of a stored message without `DELAY` and `EXPIRES`, and these two."""
    rest = {name: value for name, value in extra.items() if name not in (DELAY, EXPIRES)}
    delay, expires = extra.get(DELAY, 0.0), extra.get(EXPIRES)
    for value in (delay, 0.0 if expires is None else expires):
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < 1e10:
            raise DecodeError("a stored message has a wrong delay or expiry")
    return rest, float(delay), expires


class Graphs:
    """Reads roots, plans and stored messages. Any thread may call.

    Plans are remembered, because they never change; roots for `CHECK_SECONDS`.
    """

    def __init__(self, store: WorkflowStore, clock: Clock) -> None:
        self.store = store
        self._clock = clock
        self._plans: OrderedDict[str, GraphPlan] = OrderedDict()
        self._roots: OrderedDict[str, tuple[float, Root]] = OrderedDict()
        self._unowned: OrderedDict[str, Root] = OrderedDict()
        self._lock = Lock()

    def roots(self, workflows: Sequence[str]) -> list[Root | None]:
        """The current roots of these workflows; None where there is none.

        Raises Damaged, and ForeignId if one belongs to another owner.
        """
        found = self.store.read([(workflow, ROOT) for workflow in workflows])
        roots = [None if each is None else read_root(each.data) for each in found]
        for workflow, document, root in zip(workflows, found, roots, strict=True):
            if document is not None and root is not None and not document.broker:
                with self._lock:
                    _remember(self._unowned, workflow, root)
        return roots

    def own(self, workflow: str) -> None:
        """Adopt a workflow whose root, when it was last read, had no owner. Mostly does nothing.

        Raises ForeignId if another owner was faster.
        """
        if not self._unowned:
            return
        with self._lock:
            root = self._unowned.get(workflow)
        if root is not None:
            self.store.own_workflow(workflow, root.at)
            with self._lock:
                self._unowned.pop(workflow, None)

    def root(self, workflow: str) -> Root | None:
        """The current root of a workflow; None if there is none. Raises Damaged."""
        return self.roots([workflow])[0]

    def recent_root(self, workflow: str) -> Root | None:
        """The root of a workflow, at most `CHECK_SECONDS` old; None if there is none.

        Raises Damaged.
        """
        now = self._clock.monotonic()
        with self._lock:
            known = self._roots.get(workflow)
        if known is not None and now < known[0] + CHECK_SECONDS:
            return known[1]
        root = self.root(workflow)
        if root is not None:
            with self._lock:
                _remember(self._roots, workflow, (now, root))
        return root

    def note(self, workflow: str, root: Root, plan: GraphPlan) -> None:
        """Remember a workflow that this process has just stored; `forget` it after a rollback."""
        now = self._clock.monotonic()
        with self._lock:
            _remember(self._roots, workflow, (now, root))
            _remember(self._plans, root.token, plan)

    def forget(self, workflow: str) -> None:
        """Read the root anew at its next use, because this process changed it."""
        with self._lock:
            self._roots.pop(workflow, None)

    def forget_all(self) -> None:
        """Read every root anew at its next use."""
        with self._lock:
            self._roots.clear()

    def cancelled(self, workflow: str) -> bool:
        """True if the workflow was cancelled; noticed after `CHECK_SECONDS` at the latest."""
        root = self.recent_root(workflow)
        return root is not None and root.cancelled_at is not None

    def plan(self, workflow: str, root: Root | None = None) -> GraphPlan | None:
        """The plan of a workflow; None if the workflow does not exist. Raises Damaged.

        * `root`: the workflow's root, if the caller has it.
        """
        root = root or self.recent_root(workflow)
        if root is None:
            return None
        with self._lock:
            known = self._plans.get(root.token)
        if known is not None:
            return known
        (found,) = self.store.read([(workflow, _plan_name(root.token))])
        try:
            plan = unpack(b"" if found is None else found.data)
        except ValueError as error:
            raise Damaged(f"the plan of workflow {workflow} cannot be read: {error}") from None
        with self._lock:
            _remember(self._plans, root.token, plan)
        return plan

    def messages(
        self, workflow: str, root: Root, nodes: Sequence[int]
    ) -> dict[int, tuple[str, Envelope]]:
        """(queue, envelope) of these nodes, unverified. Raises Damaged if one is missing."""
        parts = sorted({bisect_right(root.parts, node) - 1 for node in nodes})
        names = [(workflow, _part_name(root.token, part)) for part in parts]
        found: dict[int, tuple[str, Envelope]] = {}
        for document in self.store.read(names):
            if document is None:
                raise Damaged(f"messages of workflow {workflow} are missing")
            for node, queue, payload in read_messages(document.data):
                found[node] = (queue, payload)
        wanted = {node: found[node] for node in nodes if node in found}
        if len(wanted) < len(set(nodes)):
            raise Damaged(f"messages of workflow {workflow} are missing")
        return wanted


def _remember(known: OrderedDict[str, Kept], name: str, value: Kept) -> None:
    """Keep a value; the oldest of many is forgotten."""
    known[name] = value
    known.move_to_end(name)
    while len(known) > REMEMBERED:
        known.popitem(last=False)


def read_messages(data: bytes) -> list[tuple[int, str, Envelope]]:
    """The messages in a document, each (node, queue, envelope), unverified. Raises Damaged."""
    rows = Columns({"messages": data}).unpacked("messages")
    try:
        found = [(int(node), str(queue), envelope_of(payload)) for node, queue, payload in rows]
    except (TypeError, ValueError):
        raise Damaged("stored messages of a workflow cannot be read") from None
    return found


def started(root: Root) -> Root:
    """The root of a workflow whose first nodes are sent."""
    return replace(root, starting_until=None)
