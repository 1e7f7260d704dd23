"""Every result store that keeps workflows: documents by compare-and-set, and the index of them."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest
from stores import Store

from aztask.address.owner import Owner
from aztask.message.encryption import Cipher
from aztask.message.rowsignatures import RowSignatures
from aztask.settlement import Complete
from aztask.stores.records.base import Finish, Outcome, ResultStore, RunKey, Start, State
from aztask.stores.records.tables import index
from aztask.stores.records.tables.store import TablesResults
from aztask.stores.records.workflows import (
    ROOT,
    Addition,
    Document,
    DocumentChange,
    ListedWorkflow,
    WorkflowStore,
    workflows_of,
)
from aztask.stores.tables.client import TimeBudget

LONG = bytes(range(256)) * 1024  # 256 KiB: in Azure Tables it is a blob


def kept(results: ResultStore) -> WorkflowStore:
    found = workflows_of(results)
    assert found is not None
    return found


@pytest.fixture
def workflows(results: ResultStore) -> WorkflowStore:
    return kept(results)


@pytest.fixture
def another(store: Store) -> WorkflowStore:
    """The same workflows, as another process has them."""
    return kept(store.another)


def read_one(workflows: WorkflowStore, workflow: str, name: str) -> bytes | None:
    (found,) = workflows.read([(workflow, name)])
    return None if found is None else found.data


@pytest.mark.parametrize("data", [b"", b"one", LONG], ids=["empty", "short", "long"])
def test_a_document_is_made_once_and_read_by_all(
    workflows: WorkflowStore, another: WorkflowStore, data: bytes
) -> None:
    assert workflows.read([("w", "plan")]) == [None]
    (tag,) = workflows.write([DocumentChange("w", "plan", data)])
    assert tag is not None
    assert another.write([DocumentChange("w", "plan", b"two")]) == [None]
    (found,) = another.read([("w", "plan")])
    assert found is not None
    assert (found.data, found.tag) == (data, tag)


@pytest.mark.parametrize("data", [b"two", LONG], ids=["short", "long"])
@pytest.mark.parametrize("before", [b"one", LONG[::-1]], ids=["short", "long"])
def test_only_the_reader_of_the_current_version_changes_it(
    workflows: WorkflowStore, another: WorkflowStore, before: bytes, data: bytes
) -> None:
    (first,) = workflows.write([DocumentChange("w", "bits", before)])
    (second,) = another.write([DocumentChange("w", "bits", data, first)])
    assert second is not None
    assert workflows.write([DocumentChange("w", "bits", b"late", first)]) == [None]
    assert read_one(workflows, "w", "bits") == data
    (third,) = workflows.write([DocumentChange("w", "bits", b"three", second)])
    assert third is not None
    assert read_one(another, "w", "bits") == b"three"


def test_each_change_of_a_call_succeeds_or_fails_alone(workflows: WorkflowStore) -> None:
    (tag,) = workflows.write([DocumentChange("w", "a", b"1")])
    answers = workflows.write(
        [
            DocumentChange("w", "a", b"2"),
            DocumentChange("w", "b", b"1"),
            DocumentChange("w", "a", b"3", tag),
        ]
    )
    assert [answer is None for answer in answers] == [True, False, False]
    found = workflows.read([("w", "b"), ("w", "c"), ("w", "a")])
    assert [each and each.data for each in found] == [b"1", None, b"3"]


def test_writers_that_race_lose_no_change(workflows: WorkflowStore, another: WorkflowStore) -> None:
    """Each adds a byte until it has succeeded, through two connections at once."""
    workflows.write([DocumentChange("w", "bits", b"")])

    def add(number: int) -> None:
        store = (workflows, another)[number % 2]
        for _ in range(200):
            (now,) = store.read([("w", "bits")])
            assert now is not None
            data = now.data + bytes([number])
            if store.write([DocumentChange("w", "bits", data, now.tag)]) != [None]:
                return
        raise AssertionError("it never succeeded")

    with ThreadPoolExecutor(4) as threads:
        list(threads.map(add, range(12)))
    assert sorted(read_one(workflows, "w", "bits") or b"") == list(range(12))


def appended(workflows: WorkflowStore, name: str, **pieces: bytes) -> Document | None:
    (found,) = workflows.append([Addition("w", name, pieces)])
    return found


@pytest.mark.parametrize("data", [b"", b"one.", LONG], ids=["empty", "short", "long"])
def test_pieces_are_appended_without_a_condition_and_replaced_by_a_write(
    workflows: WorkflowStore, another: WorkflowStore, data: bytes
) -> None:
    assert appended(workflows, "bits", p1=b"x") is None, "there is no document"
    assert workflows.read([("w", "bits")]) == [None]
    (tag,) = workflows.write([DocumentChange("w", "bits", data)])
    first = appended(workflows, "bits", p2=b"2", p3=b"3")
    assert first is not None
    assert first.data == data + b"23"
    second = appended(another, "bits", p1=b"1")
    assert second is not None
    assert sorted(second.data.removeprefix(data)) == sorted(b"123")
    assert workflows.read([("w", "bits")]) == [second]
    for old in (tag, first.tag):
        assert workflows.write([DocumentChange("w", "bits", b"late", old)]) == [None]
    assert workflows.write([DocumentChange("w", "bits", b"all", second.tag)]) != [None]
    assert read_one(another, "w", "bits") == b"all"
    third = appended(another, "bits", p2=b"2")
    assert third is not None
    assert third.data == b"all2"


def test_writers_that_append_at_once_lose_nothing_and_the_last_one_finds_all(
    workflows: WorkflowStore, another: WorkflowStore
) -> None:
    workflows.write([DocumentChange("w", "bits", b"")])

    def add(number: int) -> bytes:
        store = (workflows, another)[number % 2]
        found = appended(store, "bits", **{f"p{number}": bytes([number])})
        assert found is not None
        return found.data

    with ThreadPoolExecutor(4) as threads:
        seen = list(threads.map(add, range(24)))
    assert max(map(len, seen)) == 24
    assert sorted(read_one(workflows, "w", "bits") or b"") == list(range(24))
    assert all(number in data for number, data in enumerate(seen))


@pytest.mark.parametrize("workflow", ["order-1", "a b/c\\d#e?f;g", "é" * 500, "~x", "w.1"])
def test_workflows_are_told_apart_by_their_ids(workflows: WorkflowStore, workflow: str) -> None:
    others = [workflow + suffix for suffix in ("x", ";", ".1", "-")]
    for each in [workflow, *others]:
        workflows.announce(each, 5.0)
        workflows.write(
            [DocumentChange(each, ROOT, each.encode()), DocumentChange(each, "plan", b"p")]
        )
    assert {each.workflow for each in workflows.open_workflows(10)} == {workflow, *others}
    assert workflows.delete_workflow(ListedWorkflow(workflow, 5.0))
    assert not workflows.delete_workflow(ListedWorkflow(workflow, 5.0))
    assert read_one(workflows, workflow, ROOT) is None
    assert [read_one(workflows, each, ROOT) for each in others] == [e.encode() for e in others]
    assert {each.workflow for each in workflows.open_workflows(10)} == set(others)


def test_the_index_lists_open_workflows_page_by_page(workflows: WorkflowStore) -> None:
    for number in range(7):
        workflows.announce(f"w{number}", float(number))
    workflows.announce("w3", 99.0)  # it is listed already
    found, after = [], ""
    while page := workflows.open_workflows(3, after):
        assert len(page) <= 3
        found += page
        after = page[-1].workflow
    assert sorted(found, key=lambda each: each.at) == [
        ListedWorkflow(f"w{number}", float(number)) for number in range(7)
    ]


def test_ended_workflows_leave_the_open_ones_and_can_return(workflows: WorkflowStore) -> None:
    for number in range(4):
        workflows.announce(f"w{number}", 1.0)
        for _ in range(2):  # repeating it changes nothing
            workflows.close_workflow(f"w{number}", 1.0, 1000.0 + number)
    assert workflows.open_workflows(10) == []
    newest = [ListedWorkflow(f"w{number}", 1.0, 1000.0 + number) for number in (3, 2, 1, 0)]
    assert workflows.ended_workflows(10) == newest
    assert workflows.ended_workflows(2) == newest[:2]
    old = workflows.ended_workflows(10, before=1001.5)
    assert {each.workflow for each in old} == {"w0", "w1"}
    workflows.reopen_workflow("w1", 1.0, 1001.0)
    assert workflows.open_workflows(10) == [ListedWorkflow("w1", 1.0)]
    assert [each.workflow for each in workflows.ended_workflows(10)] == ["w3", "w2", "w0"]
    assert workflows.delete_workflow(newest[0]) is False
    assert [each.workflow for each in workflows.ended_workflows(10)] == ["w2", "w0"]


def test_a_list_has_the_summary_where_each_root_would_be_a_request(store: Store) -> None:
    results, workflows = store.results, kept(store.results)

    def summary() -> bytes:
        (found,) = workflows.all_workflows(10)
        return found.summary

    workflows.announce("w", 1.0, b"one")
    assert summary() == b"one" * results.remote
    workflows.announce("w", 1.0, b"another")
    assert summary() == b"one" * results.remote, "it was listed"
    workflows.describe("w", 1.0, b"two")
    assert summary() == b"two" * results.remote
    workflows.describe("v", 1.0, b"two")
    assert summary() == b"two" * results.remote, "one that is not listed stays so"
    workflows.close_workflow("w", 1.0, 2000.0, b"three")
    assert summary() == b"three" * results.remote
    workflows.describe("w", 1.0, b"two")
    assert summary() == b"three" * results.remote


def test_a_summary_that_was_changed_is_none(store: Store) -> None:
    signatures = RowSignatures([b"a-key-with-enough-bytes-in-it-0123456789"])
    results = store.of(Owner("servicebus://mine"), signatures)
    workflows = kept(results)
    if not isinstance(results, TablesResults):
        pytest.skip("a file keeps no summary")
    workflows.announce("v", 1.0, b"one")
    workflows.announce("w", 1.0, b"two")
    first, second = (
        results._requests.query(TimeBudget(), "RowKey eq @key", {"key": key}, 10)[0]
        for key in ("v", "w")
    )
    for row in (first, {**second, "summary": first["summary"], "signature": first["signature"]}):
        results._requests.put(TimeBudget(), row)
    assert {each.workflow: each.summary for each in workflows.all_workflows(10)} == {
        "v": b"one",
        "w": b"",
    }
    for name in ("summary", "signature"):
        results._requests.put(TimeBudget(), {**second, name: 7})
        for listed in (workflows.open_workflows(10), workflows.all_workflows(10)):
            assert {each.workflow for each in listed} == {"v", "w"}, "it hides no workflow"


def test_a_summary_is_encrypted_and_goes_to_the_next_owner(store: Store) -> None:
    key = b"a-key-with-enough-bytes-in-it-0123456789"
    old, new = Owner("servicebus://old"), Owner("servicebus://new")
    first = store.of(old, RowSignatures([key], cipher=Cipher([key], encrypt=True)))
    if not isinstance(first, TablesResults):
        pytest.skip("a file keeps no summary")
    kept(first).announce("v", 1.0, b"an open one")
    kept(first).announce("w", 1.0)
    kept(first).close_workflow("w", 1.0, 2000.0, b"an ended one")
    rows = first._requests.query(TimeBudget(), "PartitionKey ge ''", {}, 100)
    assert "one" not in str([row.get("summary") for row in rows])
    second = store.of(new, RowSignatures([key], cipher=Cipher([key], encrypt=True)))
    assert isinstance(second, TablesResults)
    second.adopt(old)
    assert second.workflows.adopt(old) == 2
    found = {each.workflow: each.summary for each in kept(second).all_workflows(10)}
    assert found == {"v": b"an open one", "w": b"an ended one"}


def test_documents_and_runs_of_one_name_do_not_meet(
    results: ResultStore, workflows: WorkflowStore
) -> None:
    workflows.announce("w", 1.0)
    workflows.write([DocumentChange("w", ROOT, b"root")])
    results.start([Start(RunKey("w"), "shop.a", "default", 1, "one", "worker", 1000.0)])
    assert results.forget("w")
    assert read_one(workflows, "w", ROOT) == b"root"
    assert results.get("w") is None


def test_a_purge_keeps_the_runs_of_workflows_that_exist(
    results: ResultStore, workflows: WorkflowStore
) -> None:
    workflows.announce("w", 1.0)
    workflows.write([DocumentChange("w", ROOT, b"root")])
    for task_id in ("w.1", "w.12", "w1.1", "w", "w.x", "9"):
        key = RunKey(task_id)
        results.start([Start(key, "shop.a", "default", 1, "one", "worker", 1000.0)])
        ended = Outcome(State.SUCCEEDED, Complete(), b"\x01", at=2000.0)
        results.record([Finish(key, "one", ended)])
    assert results.purge(3000.0) == 4
    assert results.get("w.1") is not None
    workflows.close_workflow("w", 1.0, 2000.0)
    assert results.purge(3000.0) == 0
    workflows.delete_workflow(ListedWorkflow("w", 1.0, 2000.0))
    assert results.purge(3000.0) == 2


def test_a_purge_goes_on_behind_the_many_runs_that_it_keeps(
    results: ResultStore, workflows: WorkflowStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(index, "PURGE_PAGE", 5)
    workflows.announce("w", 1.0)
    workflows.write([DocumentChange("w", ROOT, b"root")])
    keys = [RunKey(f"w.{number}") for number in range(100)]
    keys += [RunKey(f"old-{number}") for number in range(20)]
    for some, at in ((keys[:100], 2000.0), (keys[100:], 1000.0)):  # the latest come first
        results.start([Start(key, "shop.a", "default", 1, "one", "worker", 1.0) for key in some])
        ended = Outcome(State.SUCCEEDED, Complete(), at=at)
        results.record([Finish(key, "one", ended) for key in some])
    assert results.purge(3000.0) == 20
    assert results.get("w.99") is not None
