"""What result stores encrypt: outcomes, checkpoints, documents and pieces, in files and in tables.

The secret is looked for in what the store has, past aztask.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from stores import Store

from aztask.address.owner import NO_OWNER, Owner
from aztask.errors import BrokerUnavailable, KeyMissing
from aztask.message.codec import Codec
from aztask.message.encryption import Cipher, is_encrypted
from aztask.message.payload import StoredValue, names_in
from aztask.message.rowsignatures import RowSignatures
from aztask.settlement import Abandon, Complete, Resubmit
from aztask.stores.records.base import (
    Finish,
    Outcome,
    Owned,
    Recorded,
    ResultStore,
    RunKey,
    RunRecord,
    Start,
    StartAnswer,
    State,
)
from aztask.stores.records.rowsigning import LOCKED
from aztask.stores.records.workflows import Addition, DocumentChange, WorkflowStore

SIGNING = b"a-key-that-no-attacker-knows-0123456789"
OLD, NEW = b"the-old-key-with-enough-bytes-in-it-0123", b"the-new-key-with-enough-bytes-in-it-4567"
OURS = Owner("servicebus://shop.example")
RUN = RunKey("paid")
SECRET = b"4111-1111-1111-1111"
TEXT = SECRET.decode()
LONG = SECRET * 20_000  # in Azure Tables it is a blob
REFERENCE = f"results/0000000123/{'a' * 32}"


def keys(*names: bytes, encrypt: bool = True, environment: str = "") -> RowSignatures:
    cipher = Cipher(names, encrypt=encrypt, environment=environment)
    return RowSignatures([SIGNING], cipher=cipher, environment=environment)


@pytest.fixture
def ours(store: Store) -> ResultStore:
    return store.of(OURS, keys(OLD))


def start(
    results: ResultStore, key: RunKey = RUN, owner: str = "one", at: float = 1.0
) -> StartAnswer:
    (answer,) = results.start([Start(key, "pay", "default", 1, owner, "worker", at)])
    return answer


def value_of(data: bytes = SECRET) -> bytes:
    return Codec().encode_value(data)


def failed(state: State = State.FAILED, at: float = 5.25) -> Outcome:
    settlement = Complete() if state is State.FAILED else Resubmit(delay=1.5, due=9.0)
    return Outcome(state, settlement, None, "CardError", f"no {TEXT}", f"at {TEXT}", at, 0.125)


def finish(results: ResultStore, outcome: Outcome, key: RunKey = RUN) -> None:
    assert isinstance(start(results, key), Owned)
    assert results.record([Finish(key, "one", outcome)]) == [True]


def succeeded(data: bytes = SECRET) -> Outcome:
    return Outcome(State.SUCCEEDED, Complete(), value_of(data), at=5.25, duration=0.125)


def nowhere(store: Store, key: RunKey = RUN) -> None:
    row: dict[str, Any] = store.outsider.raw(key)
    assert row
    assert TEXT not in repr(row)
    everything = b"".join(store.of(NO_OWNER).scan())
    assert SECRET not in everything


# -- outcomes --------------------------------------------------------------------------------


@pytest.mark.parametrize("data", [SECRET, LONG], ids=["short", "long"])
def test_a_value_is_read_with_the_key_and_nowhere_in_the_store(
    store: Store, ours: ResultStore, data: bytes
) -> None:
    finish(ours, succeeded(data))
    assert start(ours, owner="two") == Recorded(succeeded(data))
    for found in (ours.get("paid"), *ours.history("paid"), *ours.recent()):
        assert found is not None
        assert (found.outcome, found.unverified, found.damage) == (succeeded(data), False, "")
    nowhere(store)


@pytest.mark.parametrize("state", [State.FAILED, State.RETRYING])
def test_the_text_and_the_traceback_of_an_error_are_encrypted(
    store: Store, ours: ResultStore, state: State
) -> None:
    finish(ours, failed(state))
    found = ours.get("paid")
    assert found is not None
    assert found.outcome == failed(state)
    nowhere(store)


def test_what_a_broker_has_dead_lettered_is_encrypted(store: Store, ours: ResultStore) -> None:
    record = RunRecord(RUN, "pay", "default", State.FAILED, outcome=failed())
    assert ours.bury([record]) == [True]
    found = ours.get("paid")
    assert found is not None
    assert found.outcome == failed()
    nowhere(store)


def test_earlier_starts_keep_no_text(store: Store, ours: ResultStore) -> None:
    finish(ours, replace(failed(State.RETRYING), settlement=Abandon()))
    assert isinstance(start(ours, owner="two", at=9.0), Owned)
    (found,) = ours.history("paid")
    (earlier,) = found.earlier.kept
    assert (earlier.end, earlier.error) == ("retrying", "CardError")
    nowhere(store)


def test_a_reader_without_the_key_sees_how_it_ended(store: Store, ours: ResultStore) -> None:
    finish(ours, failed())
    finish(ours, succeeded(), RunKey("fine"))
    for reader in (store.of(OURS), store.of(OURS, keys(NEW)), store.of(OURS, RowSignatures())):
        found = reader.get("paid")
        assert found is not None
        assert found.outcome is not None
        assert (found.state, found.damage) == (State.FAILED, "")
        outcome = found.outcome
        assert (outcome.error_type, outcome.error, outcome.traceback) == ("CardError", LOCKED, "")
        fine = reader.get("fine")
        assert fine is not None
        assert fine.outcome is not None
        with pytest.raises(KeyMissing, match="the value: it is encrypted with the key"):
            Codec().decode_value(fine.outcome.value or b"")
        assert not isinstance(start(reader, RunKey("fine"), "two"), Owned), "it does not run again"


def test_a_signature_covers_what_is_stored_and_needs_no_key_of_encryption(
    store: Store, ours: ResultStore
) -> None:
    finish(ours, succeeded())
    verifier = store.of(OURS, RowSignatures([SIGNING], old=False))
    found = verifier.get("paid")
    assert found is not None
    assert (found.state, found.unverified) == (State.SUCCEEDED, False)


def test_a_value_of_another_run_or_environment_is_damage(store: Store) -> None:
    """Also if nothing is signed: the encryption knows its place."""
    cipher = Cipher([OLD], encrypt=True)
    writer = store.of(OURS, RowSignatures(cipher=cipher))
    finish(writer, succeeded())
    finish(writer, succeeded(b"other"), RunKey("other"))
    column = "value" if store.name == "local" else "body"
    store.outsider.damage_run(RUN, {column: store.outsider.raw(RunKey("other"))[column]})
    found = writer.get("paid")
    assert found is not None
    assert "cannot be decrypted" in found.damage
    elsewhere = store.of(OURS, RowSignatures(cipher=Cipher([OLD], environment="staging")))
    found = elsewhere.get("other")
    assert found is not None
    assert "another message, row or environment" in found.damage


def test_keys_are_rotated_without_a_gap(store: Store, ours: ResultStore) -> None:
    finish(ours, succeeded())
    added, moved = store.of(OURS, keys(OLD, NEW)), store.of(OURS, keys(NEW, OLD))
    finish(moved, failed(), RunKey("new"))
    for reader in (added, moved):
        old, new = reader.get("paid"), reader.get("new")
        assert old is not None
        assert new is not None
        assert (old.outcome, new.outcome) == (succeeded(), failed())
    last = store.of(OURS, keys(NEW)).get("new")
    assert last is not None
    assert last.outcome == failed()


def test_rows_of_before_are_read_and_keys_alone_change_nothing(store: Store) -> None:
    """With keys and without `encrypt`, a program without keys reads what is written."""
    before, ready = (
        store.of(OURS, RowSignatures([SIGNING])),
        store.of(OURS, keys(OLD, encrypt=False)),
    )
    finish(before, succeeded())
    finish(ready, failed(), RunKey("ready"))
    assert ready.save(RUN, "nobody", b"x") is False
    for reader in (store.of(OURS, keys(OLD)), ready, before):
        old, new = reader.get("paid"), reader.get("ready")
        assert old is not None
        assert new is not None
        assert (old.outcome, new.outcome) == (succeeded(), failed())
    names = {"value", "body", "error", "traceback", "state"}
    rows = [store.outsider.raw(each) for each in (RUN, RunKey("ready"))]
    assert not any(is_encrypted(row.get(name)) for row in rows for name in names)


def test_a_task_that_returns_nothing_pays_nothing(store: Store, ours: ResultStore) -> None:
    finish(ours, Outcome(State.SUCCEEDED, Complete(), b"\xc0", at=5.25))
    found = store.of(OURS).get("paid")
    assert found is not None
    assert found.outcome is not None
    assert found.outcome.value == b"\xc0"


# -- checkpoints -----------------------------------------------------------------------------


@pytest.mark.parametrize("data", [SECRET, LONG], ids=["short", "long"])
def test_a_checkpoint_is_read_with_the_key_alone(
    store: Store, ours: ResultStore, data: bytes
) -> None:
    start(ours)
    assert ours.save(RUN, "one", value_of(data))
    assert start(ours, owner="two") == Owned(2, value_of(data))
    nowhere(store)


def test_a_task_does_not_begin_anew_where_the_key_of_its_checkpoint_is_missing(
    store: Store, ours: ResultStore
) -> None:
    start(ours)
    assert ours.save(RUN, "one", value_of())
    with pytest.raises(
        BrokerUnavailable, match="the checkpoint of task paid waits: it is encrypted"
    ):
        start(store.of(OURS, keys(NEW)), owner="two")
    both = store.of(OURS, keys(NEW, OLD))
    answer = start(both, owner="three")
    assert isinstance(answer, Owned)
    assert answer.saved == value_of()


def test_references_are_found_in_what_is_encrypted(store: Store, ours: ResultStore) -> None:
    """Or a large checkpoint would be collected while its task waits."""
    start(ours)
    reference = Codec().encode_value([StoredValue.of(REFERENCE, b"x"), TEXT])
    assert ours.save(RUN, "one", reference)
    ours.workflows.announce("w", 1.0)
    ours.workflows.write([DocumentChange("w", "part-1-0", reference.replace(b"a" * 32, b"b" * 32))])
    names = {name for data in store.of(NO_OWNER).scan() for name in names_in(data)}
    assert names >= {REFERENCE, REFERENCE.replace("a" * 32, "b" * 32)}
    nowhere(store)


# -- documents of workflows ------------------------------------------------------------------


def read(workflows: WorkflowStore, name: str = "plan") -> bytes | None:
    (found,) = workflows.read([("w", name)])
    return None if found is None else found.data


@pytest.mark.parametrize("data", [SECRET, LONG], ids=["short", "long"])
def test_documents_and_pieces_are_encrypted_each_alone(
    store: Store, ours: ResultStore, data: bytes
) -> None:
    workflows = ours.workflows
    workflows.announce("w", 1.0)
    (tag,) = workflows.write([DocumentChange("w", "plan", data)])
    workflows.append([Addition("w", "plan", {"a": b"+" + SECRET, "b": b"-" + SECRET})])
    (found,) = workflows.append([Addition("w", "plan", {"c": b"*" + SECRET})])
    assert found is not None
    assert found.refused == ""
    assert found.data.startswith(data)
    assert sorted(found.data.removeprefix(data).replace(SECRET, b"")) == sorted(b"+-*")
    assert tag is not None
    assert SECRET not in b"".join(store.of(NO_OWNER).scan())
    (now,) = workflows.read([("w", "plan")])
    assert now is not None
    assert workflows.write([DocumentChange("w", "plan", b"next", now.tag)]) != [None]
    assert read(workflows) == b"next"


def test_pieces_of_two_keys_and_of_before_are_one_document(store: Store) -> None:
    before = store.of(OURS, RowSignatures([SIGNING])).workflows
    before.write([DocumentChange("w", "plan", b"clear")])
    before.append([Addition("w", "plan", {"a": b"+a"})])
    store.of(OURS, keys(OLD)).workflows.append([Addition("w", "plan", {"b": b"+b"})])
    both = store.of(OURS, keys(NEW, OLD)).workflows
    (found,) = both.append([Addition("w", "plan", {"c": b"+c"})])
    assert found is not None
    assert found.data.startswith(b"clear")
    assert sorted(found.data.removeprefix(b"clear").split(b"+")) == [b"", b"a", b"b", b"c"]


def test_a_document_without_its_key_waits(store: Store, ours: ResultStore) -> None:
    ours.workflows.write([DocumentChange("w", "plan", SECRET)])
    for reader in (store.of(OURS), store.of(OURS, keys(NEW))):
        with pytest.raises(BrokerUnavailable, match="document plan of workflow w waits: it is enc"):
            read(reader.workflows)
    assert read(store.of(OURS, keys(NEW, OLD)).workflows) == SECRET


def test_a_document_is_read_with_the_key_of_encryption_alone(
    store: Store, ours: ResultStore
) -> None:
    ours.workflows.write([DocumentChange("w", "plan", SECRET)])
    ours.workflows.append([Addition("w", "plan", {"a": b"+a"})])
    reader = store.of(OURS, RowSignatures(cipher=Cipher([OLD])))
    assert read(reader.workflows) == SECRET + b"+a"
