"""What is stored of a workflow beside its bits: read as it was written, and remembered a while."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace
from typing import Any

import msgpack
import pytest
from still import Still

from aztask.address.owner import NO_OWNER, Owner
from aztask.errors import DecodeError, ForeignId
from aztask.message.envelope import Envelope
from aztask.queues.engine import Database
from aztask.stores.records.base import State
from aztask.stores.records.damage import Damaged
from aztask.stores.records.local.store import LocalResults
from aztask.stores.records.workflows import ROOT, DocumentChange
from aztask.workflows import graph as module
from aztask.workflows.graph import (
    DELAY,
    EXPIRES,
    Graphs,
    Root,
    part_documents,
    read_root,
    split_extra,
    started,
)
from aztask.workflows.plan import ROOT as ROOT_NODE
from aztask.workflows.plan import GraphPlan, JoinSlot, Node

FULL = Root(1.0, "token", 3, (1, 5), 2.0, 4.0, 6.0, State.CANCELLED)
OPEN = Root(1.0, "token", 2, (1,))
SHOP = Owner("servicebus://shop.servicebus.windows.net", "shop")
OTHER = Owner("servicebus://other.servicebus.windows.net", "shop")
PLAN = GraphPlan(
    (
        Node(ROOT_NODE, size=1, single=True),
        Node(1, JoinSlot(0, 0), next=(2,), task="shop.work", queue="jobs"),
        Node(2, JoinSlot(0, 0), takes=1, task="shop.work", queue="jobs"),
    ),
    (1,),
)


class Counting:
    """The workflows of a store, whose reads are counted by the names of the documents."""

    def __init__(self, inner: Any) -> None:
        self._inner = inner
        self.names: list[str] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def read(self, names: Any) -> Any:
        self.names += [name.partition("-")[0] for _, name in names]
        return self._inner.read(names)


class Site:
    """Graphs over a real store, with a clock; of one owner."""

    def __init__(self, path: str = ":memory:", owner: Owner = SHOP) -> None:
        self.clock = Still()
        self.database = Database(path)
        self.store = Counting(LocalResults(self.database, owner=owner).workflows)
        self.graphs = Graphs(self.store, self.clock)  # type: ignore[arg-type]

    def store_workflow(self, name: str, root: Root = OPEN, envelopes: Any = ()) -> Root:
        """Write a workflow, as its starter does."""
        documents, parts = part_documents(name, root.token, PLAN, envelopes)
        assert [each.name for each in documents] == [
            f"plan-{root.token}",
            *(f"part-{root.token}-{number}" for number in range(len(parts))),
        ]
        root = replace(root, parts=parts or (1,))
        self.store.announce(name, root.at)
        assert None not in self.store.write([*documents, DocumentChange(name, ROOT, root.pack())])
        return root

    def replace_root(self, name: str, root: Root) -> None:
        (found,) = self.store._inner.read([(name, ROOT)])
        assert self.store.write([DocumentChange(name, ROOT, root.pack(), found.tag)]) != [None]

    def reads(self) -> list[str]:
        """The kinds of documents that were read since the last call."""
        names, self.store.names = self.store.names, []
        return names


@pytest.fixture
def site() -> Iterator[Site]:
    made = Site()
    with closing(made.database):
        yield made


# -- roots -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("root", [FULL, OPEN])
def test_a_root_is_read_as_it_was_packed(root: Root) -> None:
    assert read_root(root.pack()) == root


def test_a_root_is_that_of_every_release() -> None:
    assert msgpack.unpackb(FULL.pack()) == {
        "v": 1, "at": 1.0, "token": "token", "tasks": 3, "parts": [1, 5], "starting_until": 2.0,
        "cancelled_at": 4.0, "ended_at": 6.0, "state": "cancelled",
    }  # fmt: skip
    assert (OPEN.starting_until, OPEN.cancelled_at, OPEN.ended_at) == (None, None, None)
    assert OPEN.state is State.STARTED


@pytest.mark.parametrize(
    "change",
    [
        {"v": 2},
        {"at": None},
        {"token": 5},
        {"tasks": -1},
        {"parts": None},
        {"parts": 5},
        {"parts": {}},
        {"parts": [1, "5"]},
        {"parts": [True]},
        {"starting_until": "soon"},
        {"cancelled_at": True},
        {"ended_at": "x"},
        {"state": "else"},
    ],
    ids=str,
)
def test_a_damaged_root_is_refused(change: dict[str, Any]) -> None:
    with pytest.raises(Damaged):
        read_root(msgpack.packb({**msgpack.unpackb(FULL.pack()), **change}))


@pytest.mark.parametrize("data", [b"\xc1", b"\x90", b"\x05"], ids=repr)
def test_a_root_that_is_no_map_is_refused(data: bytes) -> None:
    with pytest.raises(Damaged):
        read_root(data)


def test_a_workflow_is_started_once_its_first_nodes_are_sent() -> None:
    assert started(FULL) == replace(FULL, starting_until=None)


# -- stored messages -------------------------------------------------------------------------------


def sized(node: int, size: int) -> tuple[int, str, Envelope]:
    return node, f"queue-{node}", Envelope(b"x" * size, {"id": f"w.{node}"}, message_id=f"w.{node}")


def parts_of(site: Site, *sizes: int) -> tuple[int, ...]:
    """The first nodes of the parts for messages of these sizes, all of which can be read."""
    root = site.store_workflow("w", envelopes=[sized(n, size) for n, size in enumerate(sizes, 1)])
    nodes = list(range(1, len(sizes) + 1))
    found = site.graphs.messages("w", root, nodes)
    assert [found[node][0] for node in nodes] == [f"queue-{node}" for node in nodes]
    assert [len(found[node][1].body) for node in nodes] == list(sizes)
    for node in nodes:
        assert set(site.graphs.messages("w", root, [node])) == {node}
    return root.parts


def test_messages_share_parts_of_48_kib(site: Site) -> None:
    assert parts_of(site, 10, 10, 10) == (1,)


def test_a_part_ends_before_it_is_too_long(site: Site) -> None:
    assert parts_of(site, 24_000, 24_000, 24_000, 1_000) == (1, 3)


def test_a_message_that_is_longer_than_a_part_has_one_of_its_own(site: Site) -> None:
    assert parts_of(site, 100_000, 10, 100_000, 10) == (1, 2, 3, 4)


@pytest.mark.parametrize(("more", "parts"), [(0, (1,)), (1, (1, 2))])
def test_a_part_holds_exactly_48_kib(site: Site, more: int, parts: tuple[int, ...]) -> None:
    plain = module.payload_of(sized(1, 0)[2])
    head = len(module.payload_of(sized(1, 30_000)[2])) - 30_000
    assert head >= len(plain)
    rest = 48 * 1024 - 2 * head - 24_000
    assert parts_of(site, 24_000, rest + more) == parts


def test_a_part_has_500_messages_at_most(site: Site) -> None:
    assert parts_of(site, *[1] * 500) == (1,)
    other = Site()
    with closing(other.database):
        assert parts_of(other, *[1] * 501) == (1, 501)


def test_a_message_that_is_not_stored_is_missed(site: Site) -> None:
    root = site.store_workflow("w", envelopes=[sized(1, 10), sized(2, 60_000), sized(4, 60_000)])
    assert root.parts == (1, 2, 4)
    assert set(site.graphs.messages("w", root, [4, 1, 4])) == {1, 4}
    for nodes in ([3], [1, 3], [0], [9]):
        with pytest.raises(Damaged, match="messages of workflow w are missing"):
            site.graphs.messages("w", root, nodes)
    with pytest.raises(Damaged, match="messages of workflow w are missing"):
        site.graphs.messages("w", replace(root, token="another"), [1])


@pytest.mark.parametrize(
    "data", [b"\xc1", b"\x05", b"\x91\x01", b"\x91\x93\x01\xa1q\xc1"], ids=repr
)
def test_damaged_messages_are_refused(site: Site, data: bytes) -> None:
    root = site.store_workflow("w", envelopes=[sized(1, 10)])
    (found,) = site.store.read([("w", "part-token-0")])
    assert site.store.write([DocumentChange("w", "part-token-0", data, found.tag)]) != [None]
    with pytest.raises(Damaged):
        site.graphs.messages("w", root, [1])


def test_delay_and_expiry_are_taken_out_of_the_headers() -> None:
    extra = {"tenant": "acme", DELAY: 5, EXPIRES: 6.5}
    assert split_extra(extra) == ({"tenant": "acme"}, 5.0, 6.5)
    assert split_extra({"tenant": "acme"}) == ({"tenant": "acme"}, 0.0, None)
    assert split_extra({DELAY: 0, EXPIRES: 0}) == ({}, 0.0, 0)
    assert (DELAY, EXPIRES) == ("aztask-node-delay", "aztask-node-expires")


@pytest.mark.parametrize("name", [DELAY, EXPIRES])
@pytest.mark.parametrize("value", [True, "5", -0.5, 1e10, float("nan"), [1]], ids=str)
def test_a_wrong_delay_or_expiry_is_refused(name: str, value: Any) -> None:
    with pytest.raises(DecodeError, match="wrong delay or expiry"):
        split_extra({name: value})


# -- what is remembered ----------------------------------------------------------------------------


def test_a_root_is_remembered_for_two_seconds(site: Site) -> None:
    site.store_workflow("w")
    assert site.graphs.recent_root("w") == OPEN
    site.reads()
    site.replace_root("w", replace(OPEN, cancelled_at=9.0))
    site.clock.now += 1.75
    assert not site.graphs.cancelled("w")
    assert site.reads() == []
    assert site.graphs.root("w") != OPEN, "one that is asked for as it is now"
    site.reads()
    site.clock.now += 0.25
    assert site.graphs.cancelled("w")
    assert site.reads() == ["root"]


def test_a_root_that_this_process_changed_is_read_anew(site: Site) -> None:
    for name in ("a", "b"):
        site.store_workflow(name)
        site.graphs.recent_root(name)
    site.reads()
    site.graphs.forget("a")
    site.graphs.forget("unknown")
    site.graphs.recent_root("a")
    site.graphs.recent_root("b")
    assert len(site.reads()) == 1
    site.graphs.forget_all()
    site.graphs.recent_root("a")
    site.graphs.recent_root("b")
    assert len(site.reads()) == 2


def test_a_workflow_that_does_not_exist_is_asked_for_each_time(site: Site) -> None:
    for _ in range(2):
        assert site.graphs.recent_root("w") is None
        assert site.graphs.plan("w") is None
        assert not site.graphs.cancelled("w")
    assert len(site.reads()) == 6
    site.store_workflow("w")
    assert site.graphs.recent_root("w") == OPEN


def test_a_plan_is_read_once(site: Site) -> None:
    root = site.store_workflow("w")
    assert site.graphs.plan("w") == PLAN
    assert site.reads() == ["root", "plan"]
    site.clock.now += 100.0
    assert site.graphs.plan("w", root) == PLAN
    assert site.reads() == [], "it never changes"


def test_the_root_that_a_caller_has_is_not_read_again(site: Site) -> None:
    root = site.store_workflow("w")
    assert site.graphs.plan("w", root) == PLAN
    assert site.reads() == ["plan"]


def test_a_plan_that_is_missing_is_damaged(site: Site) -> None:
    site.store_workflow("w")
    with pytest.raises(Damaged, match="the plan of workflow w cannot be read"):
        site.graphs.plan("w", replace(OPEN, token="another"))


def test_what_this_process_has_stored_is_not_read(site: Site) -> None:
    root = site.store_workflow("w")
    site.graphs.note("w", root, PLAN)
    assert site.graphs.recent_root("w") == root
    assert site.graphs.plan("w") == PLAN
    assert site.reads() == []


def test_the_last_64_workflows_are_remembered(site: Site) -> None:
    names = [f"w{number}" for number in range(66)]
    for name in names[:64]:
        site.graphs.note(name, replace(OPEN, token=name), PLAN)
        site.store_workflow(name, replace(OPEN, token=name))
    site.graphs.note(names[0], replace(OPEN, token=names[0]), PLAN)  # it is used again
    for name in names[64:]:
        site.graphs.note(name, replace(OPEN, token=name), PLAN)
    site.reads()
    for name in (names[0], *names[3:64]):
        assert site.graphs.plan(name) is not None
    assert site.reads() == []
    for name in names[1:3]:
        assert site.graphs.plan(name) == PLAN
    assert site.reads() == ["root", "plan"] * 2


# -- owners ----------------------------------------------------------------------------------------


def test_a_workflow_without_an_owner_is_adopted_by_the_one_that_acts_on_it(tmp_path: Any) -> None:
    path = str(tmp_path / "results.db")
    before, shop, other = Site(path, NO_OWNER), Site(path, SHOP), Site(path, OTHER)
    with closing(before.database), closing(shop.database), closing(other.database):
        before.store_workflow("w")
        shop.store_workflow("mine")
        owned: list[str] = []
        own = shop.store.own_workflow

        def noted(workflow: str, at: float) -> None:
            owned.append(workflow)
            own(workflow, at)

        shop.store.own_workflow = noted  # type: ignore[attr-defined]
        shop.graphs.own("w")
        assert owned == [], "its root was not read"
        assert shop.graphs.roots(["w", "mine", "unknown"]) == [OPEN, OPEN, None]
        other.graphs.root("w")
        for name in ("mine", "unknown", "w", "w"):
            shop.graphs.own(name)
        assert owned == ["w"], "once, and only those without an owner"
        with pytest.raises(ForeignId):
            other.graphs.own("w")
        with pytest.raises(ForeignId):
            other.graphs.root("w")
        assert shop.graphs.root("w") == OPEN
