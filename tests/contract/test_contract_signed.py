"""What result stores sign, and what they believe: outcomes, documents, pieces, control entries.

The attacker writes into the store past aztask, and has no key.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import suppress
from types import SimpleNamespace
from typing import Any

import pytest
from damaging import ABSENT
from stores import Store

from aztask.address.owner import NO_OWNER, Owner
from aztask.message.codec import Codec
from aztask.message.rowsignatures import RowSignatures
from aztask.settlement import Complete, Resubmit
from aztask.stores.records.base import (
    Cancelled,
    Finish,
    Foreign,
    Outcome,
    Owned,
    Recorded,
    ResultStore,
    RunKey,
    Start,
    StartAnswer,
    State,
    Unreadable,
    WorkerRecord,
)
from aztask.stores.records.controls import ENTRIES, ControlStore, EntryChange
from aztask.stores.records.damage import Damaged
from aztask.stores.records.workflows import Addition, DocumentChange, WorkflowStore
from aztask.stores.rows import Place
from aztask.support.clock import SYSTEM_CLOCK
from aztask.workflows.graph import Graphs
from aztask.workflows.mailing import Mailer

KEY, OTHER = b"a-key-that-no-attacker-knows-0123456789", b"another-key-0123456789-0123456789"
OURS, THEIRS = Owner("servicebus://shop.example"), Owner("servicebus://other.example")
RUN = RunKey("paid")
LONG = bytes(range(256)) * 1024  # in Azure Tables it is a blob
STRICT = RowSignatures([KEY], old=False)
LENIENT = RowSignatures([KEY], old=True)


@pytest.fixture
def ours(store: Store) -> Iterator[ResultStore]:
    """A store with keys that obeys nothing unsigned."""
    return store.of(OURS, STRICT)


@pytest.fixture
def lenient(store: Store) -> Iterator[ResultStore]:
    """The same store, as long as old signatures count."""
    return store.of(OURS, LENIENT)


@pytest.fixture
def keyless(store: Store) -> Iterator[ResultStore]:
    """The same store, read by a program without keys."""
    return store.of(OURS)


def start(results: ResultStore, key: RunKey = RUN, owner: str = "one") -> StartAnswer:
    (answer,) = results.start([Start(key, "pay", "default", 1, owner, "worker", 1.0)])
    return answer


def ended(value: bytes = b"\xc3", at: float = 5.25) -> Outcome:
    return Outcome(State.SUCCEEDED, Complete(), value, at=at, duration=0.125)


def worker(name: str) -> WorkerRecord:
    return WorkerRecord(name, 1.0, 2.0, ("default",), 0, 0)


def record(results: ResultStore, key: RunKey = RUN, value: bytes = b"\xc3") -> None:
    start(results, key)
    assert results.record([Finish(key, "one", ended(value))]) == [True]


def refused(results: ResultStore, key: RunKey = RUN) -> None:
    """The run is neither believed nor started, and is in quarantine."""
    assert isinstance(answer := start(results, key, "two"), Unreadable)
    assert "sign" in answer.reason
    found = results.get(key.task_id)
    assert found is not None
    assert (found.state, found.outcome) == (State.UNREADABLE, None)
    listed = results.recent(state=State.UNREADABLE)
    assert [each.key.task_id for each in listed] == [key.task_id]


# -- outcomes -------------------------------------------------------------------------------------


@pytest.mark.parametrize("value", [b"\xc3", LONG], ids=["short", "long"])
def test_what_one_writes_another_with_the_key_believes(store: Store, value: bytes) -> None:
    record(store.of(OURS, STRICT), value=value)
    rotated = store.of(OURS, RowSignatures([OTHER, KEY], old=False))
    assert start(rotated, owner="two") == Recorded(ended(value))
    found = rotated.get("paid")
    assert found is not None
    assert (found.outcome, found.unverified) == (ended(value), False)


def test_an_error_is_signed_with_its_text(ours: ResultStore) -> None:
    start(ours)
    outcome = Outcome(
        State.FAILED, Complete(), error_type="E", error="r\u00f6t \ud800", traceback="t", at=2.0
    )
    text = outcome if ours.remote else Outcome(State.FAILED, Complete(), error_type="E", at=2.0)
    assert ours.record([Finish(RUN, "one", text)]) == [True]
    assert start(ours, owner="two") == Recorded(text)


def test_a_run_that_waits_for_its_retry_is_signed_and_started_again(ours: ResultStore) -> None:
    start(ours)
    again = Outcome(State.RETRYING, Resubmit(delay=1.5, due=9.0), None, "E", "e", at=3.0)
    assert ours.record([Finish(RUN, "one", again)]) == [True]
    assert start(ours, owner="two") == Recorded(again)


def test_a_reader_without_keys_reads_and_is_told(
    ours: ResultStore, keyless: ResultStore, caplog: pytest.LogCaptureFixture
) -> None:
    record(ours)
    with caplog.at_level(logging.INFO):
        found = keyless.get("paid")
        assert keyless.get("paid") == found
    assert found is not None
    assert found.unverified
    assert found.outcome == ended()
    assert [each.getMessage() for each in caplog.records if "not verified" in each.message] != []
    assert caplog.text.count("not verified") == 1


def test_an_unsigned_outcome_counts_until_old_signatures_end(
    ours: ResultStore, lenient: ResultStore, keyless: ResultStore
) -> None:
    record(keyless)
    assert start(lenient, owner="two") == Recorded(ended())
    refused(ours)


def test_a_signature_that_was_taken_away_is_as_none(
    store: Store, ours: ResultStore, lenient: ResultStore
) -> None:
    record(ours)
    store.outsider.damage_run(RUN, {"signature": ABSENT})
    assert start(lenient, owner="two") == Recorded(ended())
    refused(ours)


@pytest.mark.parametrize("old", [True, False])
@pytest.mark.parametrize("what", ["value", "state", "settlement", "duration"])
def test_an_outcome_that_a_stranger_changed_is_in_quarantine(
    store: Store, old: bool, what: str
) -> None:
    results = store.of(OURS, LENIENT if old else STRICT)
    record(results)
    record(results, RunKey("forged"), b"\xc2")
    start(results, RunKey("dead"))
    failed = Outcome(State.FAILED, Resubmit(delay=0.0, due=1.0), error_type="E", at=5.25)
    assert results.record([Finish(RunKey("dead"), "one", failed)]) == [True]
    other = store.outsider.raw(RunKey("forged" if what == "value" else "dead"))
    column = "body" if what == "value" and store.name == "tables" else what
    change = 99.0 if what == "duration" else other[column]
    text = change.decode() if what == "state" and isinstance(change, bytes) else change
    store.outsider.damage_run(RUN, {column: text})
    refused(results)


@pytest.mark.parametrize("old", [True, False])
def test_an_outcome_of_another_run_is_in_quarantine(store: Store, old: bool) -> None:
    results = store.of(OURS, LENIENT if old else STRICT)
    record(results, RunKey("refused"), b"\xc2")
    record(results)
    names = ["value" if store.name == "local" else "body", "signature", "ended_at", "duration"]
    other = store.outsider.raw(RunKey("refused"))
    store.outsider.damage_run(RUN, {name: other[name] for name in names})
    refused(results)


@pytest.mark.parametrize("old", [True, False])
def test_a_row_of_another_owner_is_not_believed_before_it_is_adopted(
    store: Store, old: bool
) -> None:
    signatures = LENIENT if old else STRICT
    ours, theirs = store.of(OURS, signatures), store.of(THEIRS, signatures)
    record(theirs)
    store.outsider.damage_run(RUN, {"broker": OURS.broker})
    refused(ours)


def test_adopted_rows_are_believed(store: Store) -> None:
    first, theirs, ours = (
        store.of(owner, STRICT) for owner in (Owner("servicebus://first.example"), THEIRS, OURS)
    )
    record(first)
    first.workflows.write([DocumentChange("w", "plan", b"plan")])
    assert theirs.adopt(first.owner) == 1
    theirs.workflows.adopt(first.owner)  # type: ignore[attr-defined]
    assert ours.adopt(THEIRS) == 1
    ours.workflows.adopt(THEIRS)  # type: ignore[attr-defined]
    assert start(ours, owner="two") == Recorded(ended())
    assert read(ours.workflows, "plan") == b"plan"


def test_an_outcome_of_another_environment_is_in_quarantine(store: Store) -> None:
    record(store.of(OURS, RowSignatures([KEY], environment="staging")))
    refused(store.of(OURS, RowSignatures([KEY], environment="production")))


def test_an_outcome_of_another_key_is_in_quarantine(store: Store, ours: ResultStore) -> None:
    record(store.of(OURS, RowSignatures([OTHER])))
    refused(ours)


def test_a_row_comes_back_from_quarantine_when_its_key_is_there(
    store: Store, ours: ResultStore
) -> None:
    """Also in between, and for a program without keys, it is listed with its reason."""
    record(store.of(OURS, RowSignatures([OTHER])))
    refused(ours)
    (listed,) = store.of(OURS).recent(state=State.UNREADABLE)
    assert "sign" in listed.damage
    assert start(store.of(OURS), owner="two") == Recorded(ended())
    refused(ours)
    rotated = store.of(OURS, RowSignatures([KEY, OTHER], old=False))
    assert rotated.recent(state=State.UNREADABLE) == []
    assert start(rotated, owner="two") == Recorded(ended())
    assert rotated.recent(state=State.UNREADABLE) == []
    assert store.of(OURS).recent(state=State.UNREADABLE) == []
    (found,) = rotated.recent()
    assert (found.outcome, found.damage, found.unverified) == (ended(), "", False)


def test_an_unsigned_row_comes_back_from_quarantine_with_old_signatures(
    ours: ResultStore, lenient: ResultStore, keyless: ResultStore
) -> None:
    record(keyless)
    refused(ours)
    assert start(lenient, owner="two") == Recorded(ended())
    assert lenient.recent(state=State.UNREADABLE) == []


def test_a_changed_value_stays_in_quarantine_also_without_keys(
    store: Store, ours: ResultStore, keyless: ResultStore
) -> None:
    """Its digest needs no key."""
    record(ours)
    record(ours, RunKey("forged"), b"\xc2")
    column = "value" if store.name == "local" else "body"
    store.outsider.damage_run(RUN, {column: store.outsider.raw(RunKey("forged"))[column]})
    refused(keyless)
    refused(ours)


def test_a_row_of_another_owner_with_other_keys_is_left_alone(store: Store) -> None:
    """One that is received by mistake, such as with a task id that both use."""
    theirs = store.of(THEIRS, RowSignatures([OTHER], old=False))
    record(theirs)
    for signatures in (STRICT, LENIENT, None):
        ours = store.of(OURS, signatures)
        assert start(ours, owner="two") == Foreign(THEIRS.broker)
        assert ours.bury(theirs.history("paid")) == [False]
        assert ours.recent(state=State.UNREADABLE, everyone=True) == []
    assert theirs.recent(state=State.UNREADABLE, everyone=True) == []
    assert start(theirs, owner="two") == Recorded(ended())


def test_rows_of_others_are_listed_as_theirs_and_not_verified(store: Store) -> None:
    record(store.of(THEIRS, RowSignatures([OTHER], old=False)))
    record(store.of(OURS, STRICT), RunKey("own"))
    store.of(THEIRS).heartbeat(worker("theirs"))
    store.of(OURS).heartbeat(worker("ours"))
    for signatures, verified in ((STRICT, True), (LENIENT, True), (None, False)):
        found = store.of(OURS, signatures).recent(everyone=True)
        assert {
            each.key.task_id: (each.broker, each.state, each.damage, each.unverified)
            for each in found
        } == {
            "paid": (THEIRS.broker, State.SUCCEEDED, "", True),
            "own": (OURS.broker, State.SUCCEEDED, "", not verified),
        }
    both = RowSignatures([KEY, OTHER], old=False)
    assert [each.unverified for each in store.of(OURS, both).recent(everyone=True)] == [False] * 2


def test_what_was_signed_without_an_owner_is_believed_by_all(store: Store) -> None:
    """It was written before its program knew its broker's name."""
    ownerless, ours = store.of(NO_OWNER, STRICT), store.of(OURS, STRICT)
    record(ownerless)
    ownerless.workflows.write([DocumentChange("w", "plan", b"plan")])
    ownerless.workflows.append([Addition("w", "plan", {"a": b"+a"})])
    assert start(ours, owner="two") == Recorded(ended())
    assert read(ours.workflows, "plan") == b"plan+a"


def test_a_long_value_that_a_stranger_changed_is_not_believed(
    store: Store, ours: ResultStore
) -> None:
    """In Azure Tables it is in a blob of its own: here, in that of another run."""
    record(ours, value=LONG)
    record(ours, RunKey("forged"), LONG[::-1])
    if store.name == "local":
        store.outsider.damage_run(RUN, {"value": LONG[::-1]})
    else:
        name = store.outsider.raw(RUN)["body_blob"]
        blob = ours._blobs._container.get_blob_client(name)  # type: ignore[attr-defined]
        blob.upload_blob(b"\x94\xc4\x01\xc2\xa0\xa0\xa0", overwrite=True)
    found = ours.get("paid")
    assert found is not None
    assert "sign" in found.damage
    assert isinstance(start(ours, owner="two"), Unreadable)


def test_no_signature_shows_that_an_older_outcome_was_put_back(
    store: Store, ours: ResultStore
) -> None:
    start(ours)
    names = ["value" if store.name == "local" else "body", "signature", "ended_at", "duration"]
    names += ["state", "settlement", "error_type", "owner"]
    waits = Outcome(State.RETRYING, Resubmit(delay=1.5, due=9.0), None, "E", at=3.0)
    assert ours.record([Finish(RUN, "one", waits)]) == [True]
    before = {name: _plain(each) for name, each in store.outsider.raw(RUN).items() if name in names}
    ours.forget("paid")
    record(ours)
    gone = {name: ABSENT for name in store.outsider.raw(RUN) if name in names}
    store.outsider.damage_run(RUN, {**gone, **before})
    found = ours.get("paid")
    assert found is not None
    assert found.state is State.RETRYING


def test_no_signature_shows_that_an_outcome_was_deleted(ours: ResultStore) -> None:
    record(ours)
    assert ours.forget("paid")
    assert start(ours, owner="two") == Owned(1)


@pytest.mark.parametrize("state", [b"honest", LONG], ids=["short", "long"])
def test_a_checkpoint_is_believed_by_all_with_the_key(store: Store, state: bytes) -> None:
    start(store.of(OURS, STRICT))
    assert store.of(OURS, STRICT).save(RUN, "one", state)
    assert start(store.of(OURS), owner="two") == Owned(2, state)
    assert start(store.of(OURS, STRICT), owner="three") == Owned(3, state)


def test_a_forged_checkpoint_is_not_obeyed_and_its_task_begins_anew(
    store: Store, ours: ResultStore, lenient: ResultStore, caplog: pytest.LogCaptureFixture
) -> None:
    for name in ("paid", "other"):
        start(ours, RunKey(name))
        assert ours.save(RunKey(name), "one", name.encode())
    other = store.outsider.raw(RunKey("other"))
    names = ("saved", "saved_signature")
    store.outsider.damage_run(RUN, {name: other[name] for name in names})
    assert start(ours, owner="two") == Owned(2, None)
    assert start(lenient, owner="three") == Owned(3, None)
    assert "checkpoint of task paid is not obeyed: its signature does not fit" in caplog.text
    store.outsider.damage_run(RUN, {"saved": b"forged", "saved_signature": ABSENT})
    assert start(ours, owner="four") == Owned(4, None)
    assert start(lenient, owner="five") == Owned(5, b"forged")


def test_a_checkpoint_of_a_former_release_is_an_unsigned_one(
    store: Store, ours: ResultStore, lenient: ResultStore
) -> None:
    """In a file it leaves the signature of the one before."""
    start(ours)
    assert ours.save(RUN, "one", b"before")
    store.outsider.damage_run(RUN, {"saved": b"by a former release"})
    assert start(lenient, owner="two") == Owned(2, b"by a former release")
    assert start(ours, owner="three") == Owned(3, None)


def test_no_signature_covers_a_cancellation(ours: ResultStore, keyless: ResultStore) -> None:
    keyless.cancel("paid", 1.0)
    assert isinstance(start(ours), Cancelled)


def _plain(value: object) -> object:
    """What `raw` gives for a text of SQLite, as it was."""
    try:
        return value.decode() if isinstance(value, bytes) and value.isascii() else value
    except UnicodeDecodeError:
        return value


# -- workflows ------------------------------------------------------------------------------------


def read(workflows: WorkflowStore, name: str = "bits") -> bytes | None:
    (found,) = workflows.read([("w", name)])
    return None if found is None else found.data


@pytest.mark.parametrize("data", [b"one", LONG], ids=["short", "long"])
def test_documents_and_pieces_are_believed_by_all_with_the_key(store: Store, data: bytes) -> None:
    first, second = (store.of(OURS, STRICT).workflows for _ in range(2))
    (tag,) = first.write([DocumentChange("w", "bits", data)])
    assert tag is not None
    (found,) = second.append([Addition("w", "bits", {"a": b"+a", "b": b"+b"})])
    assert found is not None
    assert found.data == data + b"+a+b"
    first.append([Addition("w", "bits", {"c": b"+c"})])
    assert read(second) == data + b"+a+b+c"
    (now,) = first.read([("w", "bits")])
    assert now is not None
    assert second.write([DocumentChange("w", "bits", b"two", now.tag)]) != [None]
    assert read(first) == b"two"


def test_a_reader_without_keys_reads_documents(ours: ResultStore, keyless: ResultStore) -> None:
    ours.workflows.write([DocumentChange("w", "bits", b"one")])  # type: ignore[attr-defined]
    ours.workflows.append([Addition("w", "bits", {"a": b"+a"})])  # type: ignore[attr-defined]
    assert read(keyless.workflows) == b"one+a"  # type: ignore[attr-defined]


def test_unsigned_documents_and_pieces_count_until_old_signatures_end(store: Store) -> None:
    ours, lenient, keyless = (store.of(OURS, each).workflows for each in (STRICT, LENIENT, None))
    keyless.write(
        [DocumentChange("w", "plan", b"unsigned"), DocumentChange("w", "bits", b"unsigned")]
    )
    lenient.write([DocumentChange("w", "signed", b"one")])
    for name in ("signed", "bits"):
        keyless.append([Addition("w", name, {"a": b"+a"})])
        lenient.append([Addition("w", name, {"b": b"+b"})])
    assert read(lenient, "plan") == b"unsigned"
    assert read(lenient, "bits") == b"unsigned+a+b"
    assert read(lenient, "signed") == b"one+a+b"
    assert read(ours, "plan") == b""
    assert read(ours, "bits") == b""
    assert read(ours, "signed") in (b"one+b", b"")  # a file signs a document and its pieces as one


@pytest.mark.parametrize("old", [True, False])
def test_a_document_that_a_stranger_changed_is_read_as_damaged(
    store: Store, old: bool, caplog: pytest.LogCaptureFixture
) -> None:
    workflows = store.of(OURS, LENIENT if old else STRICT).workflows
    workflows.write([DocumentChange("w", "root", b"honest")])
    store.outsider.damage_document("w", "root", {"data": b"forged"})
    assert read(workflows, "root") == b""
    assert "document root of workflow w is not obeyed: its signature does not fit" in caplog.text


@pytest.mark.parametrize("old", [True, False])
def test_a_forged_piece_is_skipped_and_the_others_count(store: Store, old: bool) -> None:
    workflows = store.of(OURS, LENIENT if old else STRICT).workflows
    workflows.write([DocumentChange("w", "bits", b"one")])
    workflows.append([Addition("w", "bits", {"a": b"+a"})])
    store.outsider.forge_piece("w", "bits", b"forged")
    assert read(workflows) == b"one+a"
    workflows.append([Addition("w", "bits", {"z": b"+z"})])
    assert read(workflows) == b"one+a+z"


def test_no_signature_shows_that_an_older_document_was_put_back(store: Store) -> None:
    workflows = store.of(OURS, STRICT).workflows
    (tag,) = workflows.write([DocumentChange("w", "root", b"older")])
    before = {"data": b"older", "signature": store.outsider.signature_of("w", "root")}
    assert workflows.write([DocumentChange("w", "root", b"newer", tag)]) != [None]
    assert read(workflows, "root") == b"newer"
    store.outsider.damage_document("w", "root", before)
    assert read(workflows, "root") == b"older"


def test_unsigned_documents_and_those_with_unsigned_pieces_are_found(store: Store) -> None:
    ours, lenient, keyless = (store.of(OURS, each).workflows for each in (STRICT, LENIENT, None))
    keyless.write(
        [DocumentChange("w", "plan", b"unsigned"), DocumentChange("other", "plan", b"unsigned")]
    )
    lenient.write([DocumentChange("w", "part", b"signed"), DocumentChange("w", "bits", b"signed")])
    lenient.append([Addition("w", "part", {"a": b"+a"})])
    keyless.append([Addition("w", "bits", {"b": b"+b"})])
    assert sorted(lenient.unsigned_documents("w")) == ["bits", "plan"]
    assert ours.unsigned_documents("w") == keyless.unsigned_documents("w") == []


def test_nothing_that_was_refused_is_signed_anew(store: Store) -> None:
    """What a release before has left unsigned is read first, and what is refused is empty."""
    lenient, keyless = (store.of(OURS, each).workflows for each in (LENIENT, None))
    lenient.write([DocumentChange("w", "bits", b"honest"), DocumentChange("w", "late", b"honest")])
    keyless.write([DocumentChange("w", "plan", b"unsigned")])
    lenient.append([Addition("w", "late", {"b": b"+b"})])
    if store.name == "tables":  # in a file, an unsigned piece makes all of a document unsigned
        keyless.append([Addition("w", name, {"a": b"+a"}) for name in ("bits", "late")])
    store.outsider.forge_piece("w", "late", b"forged")
    store.outsider.damage_document("w", "bits", {"data": b"forged"})
    names = [("w", name) for name in ("bits", "late")]
    before = keyless.read(names)
    assert all(each is not None and each.refused for each in lenient.read(names))
    codec = Codec(signing_keys=[KEY])
    outlet = SimpleNamespace(sender=unsent, posted=print)
    mailer = Mailer(outlet, codec, Graphs(lenient, SYSTEM_CLOCK), SYSTEM_CLOCK)
    with suppress(Damaged):
        assert mailer.sign_anew("w")
    assert keyless.read(names) == before
    assert all(each is not None and each.refused for each in lenient.read(names))


def unsent() -> Any:
    raise AssertionError("nothing is sent")


def test_a_document_in_the_place_of_another_is_damaged(store: Store) -> None:
    workflows = store.of(OURS, STRICT).workflows
    workflows.write([DocumentChange("w", "plan-a", b"a"), DocumentChange("w", "plan-b", b"a")])
    (a, b) = (store.outsider.signature_of("w", name) for name in ("plan-a", "plan-b"))
    assert a != b
    store.outsider.damage_document("w", "plan-b", {"signature": a})
    assert read(workflows, "plan-b") == b""


# -- control entries ------------------------------------------------------------------------------


def entry(controls: ControlStore, name: str = "control") -> bytes | None:
    (found,) = controls.read([name])
    return None if found is None else found.data


def test_control_entries_are_signed(store: Store) -> None:
    ours, lenient, keyless = (store.of(OURS, each).controls for each in (STRICT, LENIENT, None))
    assert ours.write([EntryChange("control", b"paused")]) != [None]
    assert [entry(each) for each in (ours, lenient, keyless)] == [b"paused"] * 3
    assert keyless.write([EntryChange("limit-a", b"unsigned")]) != [None]
    assert entry(lenient, "limit-a") == b"unsigned"
    assert entry(ours, "limit-a") == b""


def test_a_control_entry_that_a_stranger_changed_is_not_obeyed(store: Store) -> None:
    ours = store.of(OURS, STRICT).controls
    ours.write([EntryChange("control", b"paused")])
    store.outsider.damage_entry("control", {"data": b"forged"})
    assert entry(ours) == b""
    (found,) = ours.read(["control"])
    assert found is not None
    assert ours.write([EntryChange("control", b"resumed", found.tag)]) != [None]
    assert entry(ours) == b"resumed"


def test_no_signature_shows_that_an_older_control_entry_was_put_back(store: Store) -> None:
    ours = store.of(OURS, STRICT).controls
    (tag,) = ours.write([EntryChange("control", b"paused")])
    rows = store.results.rows.of(ENTRIES)  # type: ignore[attr-defined]
    (before,) = rows.get([Place(ours.owner, "control")])
    assert ours.write([EntryChange("control", b"resumed", tag)]) != [None]
    assert entry(ours) == b"resumed"
    rows.put(before.place, before.values)
    assert entry(ours) == b"paused"


def test_an_entry_of_another_app_of_the_broker_is_not_obeyed(store: Store) -> None:
    """Limits belong to the app. An entry that another owner has is not in the place of ours."""
    shop, other = (store.of(Owner(OURS.broker, app), STRICT).controls for app in ("shop", "other"))
    other.write([EntryChange("limit-a", b"theirs")])
    rows = store.results.rows.of(ENTRIES)  # type: ignore[attr-defined]
    (row,) = rows.get([Place(other.owner, "limit-a")])
    rows.put(Place(shop.owner, "limit-a"), row.values)
    assert entry(shop, "limit-a") == b""


def test_adopted_entries_are_signed_anew(store: Store) -> None:
    old, new = Owner(THEIRS.broker, "old"), Owner(OURS.broker, "new")
    theirs = store.of(old, STRICT)
    names = ["control", "limit-a", "limit-b"]
    theirs.controls.write([EntryChange(name, name.encode()) for name in names])
    store.outsider.damage_entry("limit-b", {"data": b"forged"})
    ours = store.of(new, STRICT)
    ours.adopt(old)
    ours.controls.adopt(old)
    assert [entry(ours.controls, name) for name in names] == [b"control", b"limit-a", b""]
    renamed = store.of(Owner(OURS.broker, "newer"), STRICT)
    renamed.controls.adopt(new)
    assert [entry(renamed.controls, name) for name in names] == [b"control", b"limit-a", b""]


def test_a_former_release_leaves_an_unsigned_control_entry(store: Store) -> None:
    """Over Azure Tables it drops the signature; in a file, a trigger does."""
    lenient, keyless = (store.of(OURS, each).controls for each in (LENIENT, None))
    lenient.write([EntryChange("control", b"paused")])
    (found,) = keyless.read(["control"])
    assert found is not None
    if store.name == "local":
        store.outsider.damage_entry("control", {"data": b"by a former release"})
    else:
        keyless.write([EntryChange("control", b"by a former release", found.tag)])
    assert entry(lenient) == b"by a former release"
