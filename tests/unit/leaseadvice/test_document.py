"""The lease document: written and read, and the file that holds it."""

import json
import multiprocessing
import os
from pathlib import Path

import pytest

from aztask.errors import BrokerUnavailable, DecodeError
from aztask.leaseadvice.advice import Evidence, Observation, decide
from aztask.leaseadvice.document import LeaseDocument, QueueEntry, from_json, to_json
from aztask.leaseadvice.stores import LeaseFile

ADVICE = decide(Evidence(1000, 10.0, 60.0, 1, 3, 2), 30.0, source="pipeline", at=1234.5)
DOCUMENT = LeaseDocument(
    7, {"slow": QueueEntry(ADVICE, Observation({3: 2.5}, {90: 1.0}, 1.0, 2.0, 3, 4, 99.0))}
)


def test_what_is_written_is_read_again():
    assert from_json(to_json(DOCUMENT)) == DOCUMENT
    assert from_json(to_json(LeaseDocument())) == LeaseDocument()


def record(change):
    value = json.loads(to_json(DOCUMENT))
    change(value)
    return json.dumps(value).encode()


def test_unknown_fields_are_passed_over():
    def add(value):
        value["later"] = value["queues"]["slow"]["later"] = {"x": 1}
        value["queues"]["slow"]["advice"]["later"] = 5

    assert from_json(record(add)) == DOCUMENT


@pytest.mark.parametrize(("found", "read"), [(1e12, 7 * 86400.0), (0.001, 0.1)])
def test_leases_are_clamped(found, read):
    def change(value):
        value["queues"]["slow"]["advice"]["lease_seconds"] = found

    assert from_json(record(change)).entry("slow").advice.lease_seconds == read


def _set(path, new):
    def change(value):
        for name in path[:-1]:
            value = value[name]
        value[path[-1]] = new

    return change


QUEUE = ["queues", "slow"]


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"\0\0\0",
        b"[1]",
        b"{}",
        b'{"version": 2, "revision": 1, "queues": {}}',
        b"[" * 100_000,
        b" " * (5 << 20),
        record(_set(["revision"], "x")),
        record(_set(["queues"], [])),
        record(_set(QUEUE, 5)),
        record(_set([*QUEUE, "advice"], "long")),
        record(_set([*QUEUE, "advice", "lease_seconds"], True)),
        record(_set([*QUEUE, "advice", "lease_seconds"], "60")),
        record(_set([*QUEUE, "advice", "lease_seconds"], -1)),
        record(_set([*QUEUE, "advice", "lease_seconds"], 0)),
        record(_set([*QUEUE, "advice", "lease_seconds"], 1e99)),
        record(_set([*QUEUE, "advice", "lease_seconds"], float("nan"))),
        record(_set([*QUEUE, "advice", "lease_seconds"], 10**400)),
        record(_set([*QUEUE, "advice", "reason"], None)),
        record(_set([*QUEUE, "advice", "evidence"], None)),
        record(_set([*QUEUE, "advice", "at"], float("nan"))),
        record(_set([*QUEUE, "observed", "held"], {"-1": 1})),
        record(_set([*QUEUE, "observed", "held"], {"99999999": 1})),
        record(_set([*QUEUE, "observed", "held"], {"3": -1})),
        record(_set([*QUEUE, "observed", "lost"], float("inf"))),
    ],
)
def test_what_is_no_document_is_refused(data):
    with pytest.raises(DecodeError):
        from_json(data)


def test_advice_keeps_what_was_counted_but_the_losses_under_the_former_lease():
    raised = decide(Evidence(1000, 10.0, 60.0, 0, 9, 0), ADVICE, at=2000.0)
    entry = DOCUMENT.with_advice("slow", raised).entry("slow")
    assert entry.advice == raised
    assert (entry.observed.held, entry.observed.lost, entry.observed.lost_ever) == ({3: 2.5}, 0, 3)
    kept = DOCUMENT.with_advice("slow", ADVICE).entry("slow")
    assert kept.observed.lost == 1.0


# -- the file ----------------------------------------------------------------------------------


def test_a_file_that_is_not_there_is_an_empty_document(tmp_path):
    assert LeaseFile(tmp_path / "no" / "leases.json").load().document == LeaseDocument()


def test_a_publication_is_read_by_others_and_raises_the_revision(tmp_path):
    path = tmp_path / "new" / "leases.json"
    one, other = LeaseFile(path), LeaseFile(path)
    assert one.publish(DOCUMENT, one.load())
    found = other.load()
    assert (found.document.revision, found.document.queues) == (1, DOCUMENT.queues)
    assert [each.name for each in path.parent.iterdir() if "tmp" in each.name] == []


def test_a_stale_writer_is_refused(tmp_path):
    one, other = (LeaseFile(tmp_path / "leases.json") for _ in range(2))
    empty = one.load()
    assert one.publish(DOCUMENT, empty)
    assert not other.publish(LeaseDocument(), empty)
    assert one.load().document.queues == DOCUMENT.queues


def test_a_file_that_is_no_document_is_refused_and_not_overwritten(tmp_path):
    path = tmp_path / "leases.json"
    store = LeaseFile(path)
    before = store.load()
    path.write_text("torn")
    with pytest.raises(DecodeError):
        store.load()
    assert not store.publish(DOCUMENT, before)
    assert path.read_text() == "torn"


def test_a_directory_that_cannot_be_used_is_said(tmp_path):
    (tmp_path / "file").write_text("")
    store = LeaseFile(tmp_path / "file" / "leases.json")
    with pytest.raises(BrokerUnavailable, match="lease document"):
        store.load()
    with pytest.raises(BrokerUnavailable, match="lease document"):
        store.publish(DOCUMENT, LeaseFile(tmp_path / "none").load())


def _count(path, times):
    store = LeaseFile(Path(path))
    for _ in range(times):
        while True:
            stored = store.load()
            entry = stored.document.entry("q")
            more = entry.observed.plus(Observation(held={5: 1.0}, lost_ever=1))
            if store.publish(stored.document.with_entry("q", QueueEntry(None, more)), stored):
                break
    os._exit(0)


def test_no_count_of_two_processes_is_lost(tmp_path):
    path = str(tmp_path / "leases.json")
    fork = multiprocessing.get_context("fork")
    processes = [fork.Process(target=_count, args=(path, 40)) for _ in range(2)]
    for process in processes:
        process.start()
    for process in processes:
        process.join(30)
        assert process.exitcode == 0
    document = LeaseFile(Path(path)).load().document
    assert document.revision == 80
    assert document.entry("q").observed.lost_ever == 80
