"""The Tables store when answers are lost, the service is away or refuses, and processes die."""

from __future__ import annotations

import multiprocessing
import re
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime, timedelta
from itertools import count

import azurite
import pytest
from azure.storage.blob import AccountSasPermissions, ResourceTypes, generate_account_sas
from azurite import Azurite
from damaging import ABSENT, TableOutsider
from proxy import Proxy

from aztask.address.addresses import TablesAddress
from aztask.address.urls import parse_results
from aztask.errors import (
    BrokerError,
    BrokerUnavailable,
    ConfigurationError,
    ResultDamaged,
    TaskFailed,
)
from aztask.message.envelope import Envelope
from aztask.result import AsyncResult
from aztask.settlement import Abandon, Complete, DeadLetter
from aztask.stores.records.base import (
    Finish,
    Outcome,
    Owned,
    OwnedElsewhere,
    Recorded,
    RunKey,
    RunRecord,
    Start,
    State,
    Unreadable,
    WorkerRecord,
)
from aztask.stores.records.deadindex import IndexedDeadLetter
from aztask.stores.records.tables import blobs as tables_blobs
from aztask.stores.records.tables import index as tables_index
from aztask.stores.records.tables import leftovers
from aztask.stores.records.tables.rows import DAMAGE
from aztask.stores.records.tables.store import TablesResults
from aztask.stores.tables import client as tables_client
from aztask.stores.tables.client import TimeBudget

KEY = RunKey("a")
LONG = b"x" * 200_000
DONE = Outcome(State.SUCCEEDED, Complete(), b"v", at=100.0, duration=1.0)
LARGE = replace(DONE, value=LONG)
DEAD = Outcome(State.FAILED, DeadLetter("Max"), None, "Max", "10", "", 3000.0)
_names = count(1)


def a_start(owner: str, position: int = 1, key: RunKey = KEY) -> Start:
    return Start(key, "shop.resize", "default", position, owner, "worker", 1000.0)


def address_of(text: str) -> TablesAddress:
    address = parse_results(text)
    assert isinstance(address, TablesAddress)
    return address


@dataclass
class Tables:
    """results: through the proxies. direct: past them, as another process would see it."""

    services: tuple[Azurite, Azurite]
    table: Proxy
    blob: Proxy
    names: dict[str, str]
    opened: list[TablesResults] = field(default_factory=list)

    def open(self, text: str, **names: str) -> TablesResults:
        made = TablesResults(address_of(text), **{**self.names, **names})
        self.opened.append(made)
        return made

    @property
    def text(self) -> str:
        return azurite.account_of(*self.services)

    def proxied(self) -> TablesResults:
        return self.open(
            azurite.account_of(*self.services, table=self.table.port, blob=self.blob.port)
        )


@pytest.fixture(scope="module")
def services(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Azurite, Azurite]]:
    with azurite.storing(tmp_path_factory.mktemp("tables")) as both:
        yield both


@pytest.fixture
def tables(services: tuple[Azurite, Azurite]) -> Iterator[Tables]:
    number = next(_names)
    names = {"table": f"faults{number}", "container": f"faults-{number}"}
    made = Tables(services, Proxy(services[0].port), Proxy(services[1].port), names)
    yield made
    for each in made.opened:
        each.close()
    made.table.close()
    made.blob.close()


@pytest.fixture
def direct(tables: Tables) -> TablesResults:
    made = tables.open(tables.text)
    made.create()
    return made


@pytest.fixture
def results(tables: Tables, direct: TablesResults) -> TablesResults:
    return tables.proxied()


def losing(proxy: Proxy, kind: str, number: int) -> None:
    """Lose the answer to the request of that kind (POST, PUT, ...) that comes `number`-th from
    now; it is carried out.
    """
    before = proxy.counts[kind]

    def hook(line: bytes, seen: int) -> str | None:
        lost = line.startswith(kind.encode()) and seen == before + number
        return "drop-reply" if lost else None

    proxy.hook = hook


# -- lost answers ----------------------------------------------------------------------------


def test_the_answer_to_a_start_is_lost(
    tables: Tables, results: TablesResults, direct: TablesResults
) -> None:
    losing(tables.table, "POST", 1)
    assert results.start([a_start("one")]) == [Owned(1)]
    assert direct.start([a_start("two", position=2)]) == [OwnedElsewhere()]
    losing(tables.table, "PUT", 1)
    assert results.start([a_start("two")]) == [Owned(2)], "taken over, counted once"
    assert results.record([Finish(KEY, "two", DONE)]) == [True]


@pytest.mark.parametrize(("kind", "number"), [("PUT", 1), ("POST", 1)], ids=["row", "index"])
@pytest.mark.parametrize("outcome", [DONE, LARGE], ids=["small", "large"])
def test_the_answer_to_a_record_is_lost(
    tables: Tables,
    results: TablesResults,
    direct: TablesResults,
    kind: str,
    number: int,
    outcome: Outcome,
) -> None:
    results.start([a_start("one")])
    losing(tables.table, kind, number)
    losing(tables.blob, "PUT", 1)
    assert results.record([Finish(KEY, "one", outcome)]) == [True]
    record = direct.get("a")
    assert record is not None
    assert record.outcome == outcome
    assert [run.outcome for run in direct.recent()] == [outcome]
    assert direct.purge(200.0) == 1
    assert blobs_of(direct) == []


def test_the_answers_to_everything_else_are_lost(
    tables: Tables, results: TablesResults, direct: TablesResults
) -> None:
    results.start([a_start("one")])
    losing(tables.table, "PUT", 1)
    assert results.save(KEY, "one", LONG)
    losing(tables.table, "PUT", 1)
    results.disown([(KEY, "one")])
    assert results.start([a_start("two")]) == [Owned(1, LONG)], "given back once"
    losing(tables.table, "POST", 1)
    other = RunRecord(RunKey("b"), "task", "queue", State.FAILED, outcome=DEAD)
    results.expect([other])
    losing(tables.table, "POST", 2)  # the first is the index
    assert results.bury([other]) == [True], "ours, although the answer was lost"
    assert direct.bury([other]) == [False]
    losing(tables.table, "PUT", 1)
    assert results.cancel("c", 1.0)
    losing(tables.table, "DELETE", 1)
    assert results.forget("b")
    assert direct.get("b") is None
    assert [run.key for run in direct.recent()] == []
    note = IndexedDeadLetter("orders", Envelope(b"x", message_id="m"), "r", "d", 1.0, 1)
    losing(tables.table, "POST", 1)
    results.dead_index.note([note])
    assert len(list(direct.dead_index.notes("orders"))) == 1
    losing(tables.table, "POST", 1)
    results.dead_index.drop("orders", ["m"])
    assert list(direct.dead_index.notes("orders")) == []


# -- away, slow, refused ---------------------------------------------------------------------


CALLS: dict[str, Callable[[TablesResults], object]] = {
    "start": lambda store: store.start([a_start("one", n, RunKey(f"t{n}")) for n in range(40)]),
    "record": lambda store: store.record([Finish(KEY, "one", DONE)]),
    "get": lambda store: store.get("a"),
    "recent": lambda store: store.recent(),
    "purge": lambda store: store.purge(1.0),
    "workers": lambda store: store.workers(),
    "check": lambda store: store.check(),
    "dead": lambda store: list(store.dead_index.notes("q")),
}


@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize("mode", ["reset", "blackhole"])
def test_a_service_that_is_away_is_told_in_time(
    tables: Tables,
    results: TablesResults,
    direct: TablesResults,
    monkeypatch: pytest.MonkeyPatch,
    mode: str,
    call: str,
) -> None:
    monkeypatch.setattr(tables_client, "READ_SECONDS", 0.5)
    monkeypatch.setattr(tables_client.TimeBudget.__init__, "__defaults__", (1.5,))
    monkeypatch.setattr(tables_index, "PURGE_SECONDS", 0.75)
    tables.table.set(mode)
    began = time.monotonic()
    with pytest.raises(BrokerUnavailable, match=r"(?s)^the table '\w+' of tables://.*; try again$"):
        CALLS[call](results)
    assert time.monotonic() - began < 4.0
    tables.table.set("pass")
    tables.table.reset_all()
    assert results.start([a_start("one")]) == [Owned(1)]
    assert results.record([Finish(KEY, "one", DONE)]) == [True]


def test_a_short_outage_is_not_noticed(tables: Tables, results: TablesResults) -> None:
    """Connections that are refused, or reset before an answer, are made again inside the call."""
    results.start([a_start("one")])
    tables.table.hook = lambda line, seen: "reset" if seen == 1 else None
    tables.table.reset_all()
    assert results.record([Finish(KEY, "one", DONE)]) == [True]
    assert results.workers() == []


def test_answers_that_are_late_are_waited_for(tables: Tables, results: TablesResults) -> None:
    tables.table.delay = 1.0
    assert results.start([a_start("one", n, RunKey(f"t{n}")) for n in range(20)]) == [Owned(1)] * 20


def test_what_is_missing_is_said_with_the_command(tables: Tables) -> None:
    nowhere = tables.open(tables.text, table="nowhere")
    for call in CALLS.values():
        with pytest.raises(BrokerError) as caught:
            call(nowhere)
        assert re.fullmatch(
            r"the table 'nowhere' of tables://devstoreaccount1 does not exist; create it with: "
            r"aztask -A MODULE:APP queues create QUEUE",
            str(caught.value),
        )
    store = tables.open(tables.text, container="no-container")
    tables.open(tables.text).create()
    with pytest.raises(BrokerError, match=r"the container 'no-container' of .* does not exist"):
        store.check()
    store.start([a_start("one")])
    with pytest.raises(BrokerError, match=r"the container 'no-container' of .* does not exist"):
        store.record([Finish(KEY, "one", LARGE)])


def signed(tables: Tables, permission: str) -> str:
    token = generate_account_sas(
        azurite.ACCOUNT,
        azurite.KEY,
        ResourceTypes.from_string("co"),
        AccountSasPermissions.from_string(permission),
        datetime.now(UTC) + timedelta(hours=1),
        services="bt",
    )
    table, blob = tables.services
    return (
        f"TableEndpoint={table.endpoint};BlobEndpoint={blob.endpoint};SharedAccessSignature={token}"
    )


def test_wrong_credentials_and_rights_name_the_role(tables: Tables, direct: TablesResults) -> None:
    wrong_key = tables.text.replace(azurite.KEY, "d3Jvbmcta2V5LW9mLXRoaXMtdGVzdA==")
    for store in (tables.open(wrong_key), tables.open(signed(tables, "r"))):
        with pytest.raises(ConfigurationError) as caught:
            store.start([a_start("one", n, RunKey(f"t{n}")) for n in range(3)])
        text = str(caught.value)
        assert "Storage Table Data Contributor" in text
        assert "\n" not in text
        assert "sig=" not in text
        assert "d3Jvbmc" not in text


def test_a_signature_with_the_rights_is_enough(tables: Tables, direct: TablesResults) -> None:
    store = tables.open(signed(tables, "rwdlau"))
    store.check()
    assert store.start([a_start("one")]) == [Owned(1)]
    assert store.record([Finish(KEY, "one", LARGE)]) == [True]
    assert store.get("a") == direct.get("a")
    assert store.cancel("b", 1.0)
    assert store.purge(200.0) == 1
    assert blobs_of(direct) == []
    assert "sig" not in repr(store)


def test_what_a_task_costs(tables: Tables, results: TablesResults) -> None:
    """The figures of docs/how-to/production/keep-results-in-tables.md."""
    keys = [RunKey(f"t{n}") for n in range(100)]

    def spent(call: Callable[[], object]) -> dict[str, int]:
        before = Counter(tables.table.counts)
        call()
        return dict(tables.table.counts - before)

    starts = [a_start("one", n, key) for n, key in enumerate(keys)]
    assert spent(lambda: results.start(starts)) == {"POST": 100, "GET": 4}
    finishes = [Finish(key, "one", DONE) for key in keys]
    assert spent(lambda: results.record(finishes)) == {"PUT": 100, "POST": 100}
    assert spent(lambda: results.recent(limit=10)) == {"GET": 24 + 1 + 10}
    assert spent(lambda: results.get("t1")) == {"GET": 1}
    assert spent(lambda: results.get("nobody")) == {"GET": 2}
    assert spent(lambda: results.purge(50.0)) == {"GET": 4 + 48 + 2}, "once an hour two more"
    assert spent(lambda: results.purge(200.0)) == {"GET": 4 + 48 + 100, "DELETE": 300}
    assert tables.blob.total == 1, "one listing of old blobs, by the first purge"


# -- who dies, who is frozen -----------------------------------------------------------------


class Killed(BaseException):
    """Stands for the end of the process at that point."""


def dying(*arguments: object) -> None:
    raise Killed


def test_a_death_between_the_outcome_and_its_index_is_made_good(
    direct: TablesResults, tables: Tables, monkeypatch: pytest.MonkeyPatch
) -> None:
    dead = tables.open(tables.text)
    dead.start([a_start("one")])
    monkeypatch.setattr(dead._index, "note", dying)
    with pytest.raises(Killed):
        dead.record([Finish(KEY, "one", DONE)])
    assert direct.recent() == []
    assert direct.start([a_start("two")]) == [Recorded(DONE)]
    assert [run.outcome for run in direct.recent()] == [DONE]


def test_a_death_between_the_index_and_a_burial_leaves_the_run_to_its_owner(
    direct: TablesResults, tables: Tables, monkeypatch: pytest.MonkeyPatch
) -> None:
    dead = tables.open(tables.text)
    direct.start([a_start("one")])
    monkeypatch.setattr(dead._runs, "_change", dying)
    with pytest.raises(Killed):
        dead.bury([RunRecord(KEY, "task", "queue", State.FAILED, outcome=DEAD)])
    assert direct.recent() == [], "it has not ended"
    assert direct.record([Finish(KEY, "one", DONE)]) == [True]
    assert [run.outcome for run in direct.recent()] == [DONE]


def test_a_death_in_a_purge_leaves_a_later_run_of_the_same_id_alone(
    direct: TablesResults, tables: Tables, monkeypatch: pytest.MonkeyPatch
) -> None:
    dead = tables.open(tables.text)
    dead.start([a_start("one")])
    dead.record([Finish(KEY, "one", LARGE)])
    monkeypatch.setattr(dead._blobs, "delete", dying)
    with pytest.raises(Killed):
        dead.purge(200.0)
    assert direct.get("a") is None
    assert direct.start([a_start("again")]) == [Owned(1)]
    assert direct.purge(200.0) == 0
    assert blobs_of(direct) == []
    assert direct.record([Finish(KEY, "again", DONE)]) == [True]


def blobs_of(store: TablesResults) -> list[str]:
    return list(store._blobs._container.list_blob_names())


def test_blobs_that_no_row_names_are_swept_and_the_others_stay(
    direct: TablesResults, tables: Tables, monkeypatch: pytest.MonkeyPatch
) -> None:
    dead = tables.open(tables.text)
    dead.start([a_start("one")])
    assert dead.save(KEY, "one", LONG)
    (kept,) = blobs_of(direct)
    monkeypatch.setattr(dead._runs, "_change", dying)
    for _ in range(2):
        with pytest.raises(Killed):
            dead.record([Finish(KEY, "one", LARGE)])
    assert len(blobs_of(direct)) == 3
    monkeypatch.setattr(leftovers, "SETTLING_SECONDS", -7200.0)
    direct.purge(time.time() - 3600.0)
    assert len(blobs_of(direct)) == 3, "they are young"
    tables.open(tables.text).purge(time.time() + 3600.0)
    assert blobs_of(direct) == [kept]
    assert direct.start([a_start("two")]) == [Owned(2, LONG)]
    assert direct.record([Finish(KEY, "two", LARGE)]) == [True]
    assert len(blobs_of(direct)) == 1, "the checkpoint is needed no more"
    assert direct.forget("a")
    assert blobs_of(direct) == []


def test_leftover_blobs_are_found_however_many_others_are_older(
    tables: Tables, direct: TablesResults, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tables_blobs, "PAGE", 2)
    monkeypatch.setattr(leftovers, "SETTLING_SECONDS", -7200.0)
    keys = [RunKey(f"t{n}") for n in range(5)]
    direct.start([a_start("one", n, key) for n, key in enumerate(keys)])
    for key in keys:
        assert direct.save(key, "one", LONG)
    kept = blobs_of(direct)
    for n in range(5):
        direct._blobs.place_of(TimeBudget(), RunKey(f"u{n}"), LONG)  # its process died here
    assert len(blobs_of(direct)) == 10
    tables.open(tables.text).purge(time.time() + 3600.0)
    assert blobs_of(direct) == kept


def test_a_sweep_that_takes_long_is_continued_by_the_next_purges(
    tables: Tables, direct: TablesResults, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tables_blobs, "PAGE", 1)
    monkeypatch.setattr(leftovers, "SETTLING_SECONDS", -7200.0)
    monkeypatch.setattr(leftovers, "SWEEP_SECONDS", 0.001)  # one page each
    for n in range(4):
        direct._blobs.place_of(TimeBudget(), RunKey(f"u{n}"), LONG)
    sweeper = tables.open(tables.text)
    for _ in range(12):
        sweeper.purge(time.time() + 3600.0)
    assert blobs_of(direct) == []


def test_a_fenced_owner_leaves_no_blob(direct: TablesResults, tables: Tables) -> None:
    frozen = tables.open(tables.text)
    frozen.start([a_start("one")])
    direct.start([a_start("two")])
    assert frozen.record([Finish(KEY, "one", LARGE)]) == [False]
    assert not frozen.save(KEY, "one", LONG)
    assert blobs_of(direct) == []


def test_a_value_whose_blob_is_gone_or_damaged_is_named_and_hides_no_other(
    direct: TablesResults,
) -> None:
    keys = [RunKey(f"t{n}") for n in range(4)]
    direct.start([a_start("one", n, key) for n, key in enumerate(keys)])
    for n, key in enumerate(keys):
        direct.record([Finish(key, "one", replace(LARGE, at=100.0 + n))])
    names = {name.partition("!")[0].partition("t-")[2]: name for name in blobs_of(direct)}
    direct._blobs.delete(names["t1"])
    container = direct._blobs._container
    container.upload_blob(names["t2"], b"\x94\xc4\x01", overwrite=True)
    listed = {run.key.task_id: run for run in direct.recent()}
    assert {name: bool(run.damage) for name, run in listed.items()} == {
        "t0": False,
        "t1": True,
        "t2": True,
        "t3": False,
    }
    assert {run.state for run in listed.values()} == {State.SUCCEEDED}, "the rows are whole"
    assert listed["t3"].outcome == replace(LARGE, at=103.0)
    gone, cut = direct.get("t1"), direct.get("t2")
    assert gone is not None
    assert cut is not None
    assert gone.damage.startswith("its value is no longer in the container (blob ")
    assert cut.damage == "its value cannot be decoded (3 bytes)"
    assert direct.history("t1") == [gone]
    answers = direct.start([a_start("two", n, key) for n, key in enumerate(keys)])
    for answer in answers:
        assert isinstance(answer, Recorded), "its message can be settled all the same"
        assert answer.outcome.settlement == Complete()
    assert direct.purge(200.0) == 4
    assert blobs_of(direct) == []


def test_a_result_whose_value_is_gone_says_so_on_one_line(
    direct: TablesResults, tables: Tables
) -> None:
    direct.start([a_start("one"), a_start("one", 2, RunKey("b"))])
    failed = replace(LARGE, state=State.FAILED, settlement=DeadLetter("r"), error_type="E")
    direct.record([Finish(KEY, "one", LARGE), Finish(RunKey("b"), "one", failed)])
    direct._blobs.delete(*blobs_of(direct))
    for task_id, kind in (("a", ResultDamaged), ("b", TaskFailed)):
        result: AsyncResult[object] = AsyncResult(task_id, lambda: direct, lambda data: data)
        with pytest.raises(
            kind, match=r"its value is no longer in the container \(blob "
        ) as caught:
            result.get(timeout=5)
        assert str(caught.value).isprintable()
    assert result.error is not None
    assert result.failed()


def test_rows_of_others_and_damaged_ones_in_the_index_hide_no_run(
    direct: TablesResults, tables: Tables
) -> None:
    table = direct._requests._table
    keys = [RunKey(f"t{n}") for n in range(3)]
    direct.start([a_start("one", n, key) for n, key in enumerate(keys)])
    direct.record([Finish(key, "one", DONE) for key in keys])
    for name in ("!", "zzz", "99999999999999999999"):
        table.create_entity({"PartitionKey": "t-t0", "RowKey": name, "starts": "x"})
    (index,) = [row for row in table.query_entities("RowKey ge ''") if row.get("row")][:1]
    place = {"PartitionKey": index["PartitionKey"]}
    for n, (partition, row) in enumerate(
        [("w", "host"), ("t-t1", "../x"), ("t-a/b", index["row"]), (5, b"x"), ("t-", "")]
    ):
        name = f"{index['RowKey']}{n}"
        forged = {**place, "RowKey": name, "partition": partition, "row": row}
        table.create_entity({**forged, "blob": "2026010100/t-t1!x!" + "0" * 32})
    table.create_entity({"PartitionKey": "x", "RowKey": "forged", "at": 1.0, "partition": "w"})
    listed = direct.recent()
    assert {run.key for run in listed if not run.damage} == set(keys)
    assert len([run for run in listed if run.damage]) == 5
    assert all(run.damage.isprintable() for run in listed)
    assert direct.recent(state=State.UNREADABLE) == []
    (run,) = direct.history("t0")
    assert direct.get("t0") == run
    assert run.outcome == DONE
    assert direct.purge(200.0) == 3
    assert direct.recent() == []
    assert list(table.query_entities("PartitionKey eq 'x'")) == []
    assert tables.open(tables.text).forget("t0"), "and whatever is in its partition"


def test_half_of_a_note_of_a_dead_letter_is_dropped_too(direct: TablesResults) -> None:
    index, table = direct.dead_index, direct._requests._table
    letters = [
        IndexedDeadLetter("q", Envelope(b"x", message_id=f"m{n}"), "r", "d", 1.0, 1)
        for n in range(4)
    ]
    for each in letters:
        index.note([each])
    numbers = {
        row["RowKey"]: row["number"]
        for row in table.query_entities("RowKey ge 'k-'")
        if row.get("number")
    }
    table.delete_entity("d-q", numbers["k-m0"])
    table.delete_entity("d-q", "k-m1")
    table.upsert_entity({"PartitionKey": "d-q", "RowKey": "k-m2", "number": "../x"})
    table.create_entity({"PartitionKey": "d-q", "RowKey": "n-zzz", "key": b"x"})
    index.drop("q", {"m0", "m1", "m2"})
    assert [each.key for each in index.notes("q")] == ["m1", "m2", "m3"]
    assert index.keep_only("q", {"m3"}, 5.0) == 2
    assert [each.key for each in index.notes("q")] == ["m3"]
    index.note(letters[:3])
    assert sorted(each.key for each in index.notes("q")) == ["m0", "m1", "m2", "m3"]


def test_a_damaged_row_is_in_quarantine_although_its_finder_died(
    direct: TablesResults, tables: Tables, monkeypatch: pytest.MonkeyPatch
) -> None:
    direct.start([a_start("one")])
    outsider = TableOutsider(tables.text, tables.names["table"])
    outsider.damage_run(KEY, {"starts": "many"})
    dead = tables.open(tables.text)
    monkeypatch.setattr(dead._requests, "merge", dying)
    with pytest.raises(Killed):
        dead.start([a_start("two")])
    assert DAMAGE not in outsider.raw(KEY)
    assert len(direct.recent(state=State.UNREADABLE)) == 1
    assert isinstance(direct.start([a_start("three")])[0], Unreadable)
    assert outsider.raw(KEY)[DAMAGE] == "its starts is str, not a whole number"
    outsider.damage_run(KEY, {"starts": 1})
    assert isinstance(direct.start([a_start("four")])[0], Unreadable), "until somebody says so"
    outsider.damage_run(KEY, {DAMAGE: ABSENT})
    assert direct.start([a_start("five")]) == [Owned(2)], "repaired by hand"
    assert direct.recent(state=State.UNREADABLE) == []


def test_a_damaged_row_that_takes_no_mark_harms_no_other(
    direct: TablesResults, tables: Tables, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The service refuses it where the row is full: 252 properties or 1 MiB. Azurite does not."""

    def full(*arguments: object) -> bool:
        raise BrokerError("the table: EntityTooLarge")

    keys = [RunKey(f"t{n}") for n in range(3)]
    direct.start([a_start("one", n, key) for n, key in enumerate(keys)])
    TableOutsider(tables.text, tables.names["table"]).damage_run(keys[1], {"starts": "x"})
    monkeypatch.setattr(direct._requests, "merge", full)
    for owner, starts in (("two", 2), ("three", 3)):
        first, second, third = direct.start([a_start(owner, n, key) for n, key in enumerate(keys)])
        assert isinstance(second, Unreadable)
        assert first == third == Owned(starts)
    assert [run.key for run in direct.recent(state=State.UNREADABLE)] == [keys[1]]


def test_a_dead_workers_damaged_heartbeat_is_forgotten_after_a_day(
    direct: TablesResults, tables: Tables
) -> None:
    now = time.time()
    direct.heartbeat(WorkerRecord("dead", now, now, (), 0, 0))
    TableOutsider(tables.text, tables.names["table"]).damage_worker("dead", {"seen_at": "now"})
    tables.open(tables.text).heartbeat(WorkerRecord("a", now, now + 3600, (), 0, 0))
    assert len(direct.workers()) == 2
    tables.open(tables.text).heartbeat(WorkerRecord("a", now, now + 2 * 86400, (), 0, 0))
    assert [worker.name for worker in direct.workers()] == ["a"]


def _race(text: str, names: dict[str, str], owner: int, gate: object) -> list[tuple[bool, bool]]:
    store = TablesResults(address_of(text), **names)
    gate.wait()  # type: ignore[attr-defined]
    won = []
    for n in range(30):
        key = RunKey(f"race-{n}")
        (answer,) = store.start([a_start(f"owner-{owner}", owner, key)])
        (kept,) = store.record([Finish(key, f"owner-{owner}", replace(DONE, at=float(owner)))])
        won.append((isinstance(answer, Owned), kept))
    store.close()
    return won


def test_processes_race_and_one_owns_each_run(tables: Tables, direct: TablesResults) -> None:
    spawn = multiprocessing.get_context("spawn")
    with spawn.Manager() as manager, spawn.Pool(3) as pool:
        gate = manager.Barrier(3)
        arguments = [(tables.text, tables.names, owner, gate) for owner in range(3)]
        won = pool.starmap(_race, arguments, chunksize=1)
    for n, answers in enumerate(zip(*won, strict=True)):
        assert sorted(answers) == [(False, False), (False, False), (True, True)]
        record = direct.get(f"race-{n}")
        assert record is not None
        assert record.outcome is not None
        assert record.outcome.at == float(answers.index((True, True)))


def test_owners_that_take_each_other_over_under_lost_answers_leave_one_outcome(
    tables: Tables, results: TablesResults, direct: TablesResults
) -> None:
    """Every third answer is lost, whatever it is to; each owner's view agrees with what stands."""
    tables.table.hook = lambda line, seen: "drop-reply" if seen % 3 == 0 else None
    for n in range(20):
        key = RunKey(f"t{n}")
        (first,) = _insisting(lambda key=key: results.start([a_start("one", 1, key)]))
        assert first == Owned(1)
        if n % 2:
            assert direct.start([a_start("two", 1, key)]) == [Owned(2)]
        (kept,) = _insisting(lambda key=key: results.record([Finish(key, "one", DONE)]))
        assert kept == (n % 2 == 0)
        retrying = Outcome(State.RETRYING, Abandon(), at=5.0)
        assert direct.record([Finish(key, "two", retrying)]) == [n % 2 == 1]


def _insisting(call: Callable[[], list[object]]) -> list[object]:
    """As a worker does: try again while the store does not answer."""
    for _ in range(20):
        try:
            return call()
        except BrokerUnavailable:
            continue
    raise AssertionError("it never answered")
