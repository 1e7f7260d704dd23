"""What every result store promises of lists of runs that are read in bulk (`ResultStore.lines`)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import msgpack
import pytest
from stores import Store

from aztask.address.owner import Owner
from aztask.errors import CapabilityError, ConfigurationError
from aztask.message.encryption import Cipher
from aztask.message.rowsignatures import RowSignatures
from aztask.settlement import Abandon, Complete, Resubmit, to_record
from aztask.stores.layout import SHARDS
from aztask.stores.records.base import (
    Finish,
    Outcome,
    ResultStore,
    RunKey,
    RunLine,
    RunRecord,
    Start,
    State,
    WorkerRecord,
)
from aztask.stores.records.tables import runlines
from aztask.stores.records.tables.index import COPY, LONGEST_ERROR, SUMMARY, count_down, hours
from aztask.stores.records.tables.rows import LONGEST_COPY
from aztask.stores.records.tables.store import TablesResults
from aztask.stores.tables.client import TimeBudget

SECONDS = 20.0
MINE, THEIRS = Owner("servicebus://mine"), Owner("servicebus://theirs")
WORKER = WorkerRecord("w", 1000.0, 2000.0, ("queue-0",), 1, 0)


def record(results: ResultStore, number: int, state: State, error: str = "", at: float = 0) -> None:
    """One run that has ended: the later ones have higher numbers."""
    key, at = RunKey(f"t{number:03}"), at or 7200.0 * number
    queue, worker = f"queue-{number % 3}", f"worker-{number % 5}"
    results.start([Start(key, f"shop.task{number % 2}", queue, number, "one", worker, at - 1)])
    kind = "CardError" if error else ""
    settlement = Complete() if state.final else Resubmit(due=at + 60.0)
    outcome = Outcome(
        state, settlement, b"\x01", kind, error, "trace" * bool(error), at, number / 2
    )
    assert results.record([Finish(key, "one", outcome)]) == [True]


def fill(results: ResultStore, count: int = 40) -> None:
    for number in range(1, count + 1):
        failed = number % 4 == 0
        record(results, number, State.FAILED if failed else State.SUCCEEDED, "declined" * failed)


def pairs(
    results: ResultStore, state: State | None = None, after: str = "", *, everyone: bool = True
) -> list[tuple[RunLine, RunRecord | None]]:
    """All lines with their runs."""
    lines = results.lines(state=state, after=after, everyone=everyone)
    found: list[tuple[RunLine, RunRecord | None]] = []
    while not lines.ended:
        some = lines.more(SECONDS)
        found += zip(some, lines.read(some, SECONDS), strict=True)
    return found


def shown(run: RunRecord | None) -> RunRecord | None:
    """The run as a list shows it, without its value."""
    if run is None or run.outcome is None:
        return run
    return replace(run, outcome=replace(run.outcome, value=None))


def test_a_line_says_what_its_run_says(results: ResultStore) -> None:
    fill(results)
    for state in (None, State.FAILED, State.SUCCEEDED):
        found = pairs(results, state)
        recent = results.recent(state=state, limit=1000)
        assert [shown(run) for _, run in found] == list(map(shown, recent))
        for line, run in found:
            assert run is not None and run.outcome is not None
            assert (line.state, line.task_id) == (run.state, run.key.task_id)
            assert (line.task, line.queue, line.worker) == (run.task, run.queue, run.worker)
            assert line.at == pytest.approx(run.outcome.at, abs=0.001)
            assert (line.error, line.duration) == (run.outcome.error_text, run.outcome.duration)
    assert pairs(results, State.EXPIRED) == []


def test_a_list_goes_on_behind_any_line_also_if_runs_end_in_between(
    results: ResultStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(runlines, "FIRST_PAGE", 2)
    fill(results)
    lines = [line for line, _ in pairs(results)]
    assert len(lines) == 40
    record(results, 41, State.FAILED, "declined")
    for place in (0, 1, 20, 38, 39):
        rest = [line for line, _ in pairs(results, after=lines[place].place)]
        assert rest == lines[place + 1 :]
    failed = [line for line, _ in pairs(results, State.FAILED, lines[20].place)]
    assert failed == [line for line in lines[21:] if line.state is State.FAILED]


def test_runs_that_ended_in_one_millisecond_are_all_listed(
    results: ResultStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(runlines, "FIRST_PAGE", 2)
    for number in range(30):
        record(results, number, State.SUCCEEDED, at=7200.0)
    lines = [line for line, _ in pairs(results)]
    assert len({line.task_id for line in lines}) == 30
    rest = [line for line, _ in pairs(results, after=lines[10].place)]
    assert rest == lines[11:]


def test_a_place_that_is_none_is_refused(results: ResultStore) -> None:
    for place in ("nothing", "1", "~", "' or PartitionKey ge '", "1~2~3", "9" * 400):
        with pytest.raises(ConfigurationError, match="first page of the list"):
            results.lines(after=place)


def test_what_has_not_ended_is_listed_as_recent_lists_it(store: Store) -> None:
    results = store.results
    results.start([Start(RunKey("a"), "shop.task", "default", 1, "one", "w", 1000.0)])
    assert len(pairs(results)) == store.lists_running
    if store.lists_running:
        ((line, run),) = pairs(results, State.STARTED)
        assert (line.at, line.duration, line.error) == (1000.0, None, "")
        assert run == results.get("a")
    else:
        with pytest.raises(CapabilityError, match="only ended runs"):
            results.lines(state=State.STARTED)


def test_the_lines_of_an_owner_are_its_own_and_those_without_one(store: Store) -> None:
    mine, theirs = store.of(MINE), store.of(THEIRS)
    record(store.results, 1, State.SUCCEEDED)
    for number, each in enumerate((mine, theirs), 2):
        each.heartbeat(replace(WORKER, name=f"w{number}"))
        record(each, number, State.FAILED, "declined")
    assert [line.task_id for line, _ in pairs(mine, everyone=False)] == ["t002", "t001"]
    assert [line.task_id for line, _ in pairs(theirs, everyone=False)] == ["t003", "t001"]
    found = {line.task_id: run and run.broker for line, run in pairs(mine)}
    assert found == {"t001": "", "t002": mine.owner.broker, "t003": theirs.owner.broker}


def test_a_damaged_row_is_listed_as_damaged(store: Store) -> None:
    fill(store.results, 3)
    without_copies(store.results)
    store.outsider.damage_run(RunKey("t002"), {"settlement": "complete"})
    found = {line.task_id: run for line, run in pairs(store.another)}
    assert found.keys() == {"t001", "t002", "t003"}
    damaged = found["t002"]
    assert damaged is not None and damaged.state is State.UNREADABLE and damaged.damage


# -- the index of Azure Tables ---------------------------------------------------------------


def tables(store: Store) -> TablesResults:
    results = store.results
    if not isinstance(results, TablesResults):
        pytest.skip("a file has no index of ended runs")
    return results


def index_rows(results: TablesResults) -> list[dict[str, Any]]:
    text = "PartitionKey ge 'i' and PartitionKey lt 'j'"
    return results._requests.query(TimeBudget(), text, {}, 1000)


def without_copies(results: ResultStore) -> None:
    """The index as releases before wrote it, where there is one."""
    if isinstance(results, TablesResults):
        change_copies(results, lambda _: None)


def change_copies(results: TablesResults, change: Callable[[bytes], bytes | None]) -> None:
    for row in index_rows(results):
        changed = change(row[COPY])
        rest = {name: value for name, value in row.items() if name != COPY}
        results._requests.put(TimeBudget(), rest if changed is None else {**rest, COPY: changed})


def read_rows(results: TablesResults, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The row keys that are read one by one from now on."""
    read, seen = results._requests.read, list[str]()

    def noting(call: Any, partition: str, row: str, *more: Any) -> Any:
        seen.append(row)
        return read(call, partition, row, *more)

    monkeypatch.setattr(results._requests, "read", noting)
    return seen


def test_a_list_reads_no_row_of_what_the_index_shows(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    results = tables(store)
    fill(results)
    record(results, 41, State.FAILED, "x" * LONGEST_COPY)
    seen = read_rows(results, monkeypatch)
    found = [run for _, run in pairs(results)]
    assert list(map(shown, found)) == list(map(shown, results.recent(limit=1000)))
    del seen[1:-41]
    assert len(seen) == 1 + 41, "the long error alone, and then all for the other list"


@pytest.mark.parametrize(
    "damage", ["no list", "short", "another place", "another outcome", "no settlement"]
)
def test_a_copy_that_was_changed_does_not_count(store: Store, damage: str) -> None:
    tables(store)
    keys = RowSignatures([b"a-key-with-enough-bytes-in-it-0123456789"])
    results = store.of(MINE, keys)
    assert isinstance(results, TablesResults)
    fill(results, 8)
    some = index_rows(results)[0][COPY]

    def changed(copy: bytes) -> bytes:
        parts = msgpack.unpackb(copy)
        match damage:
            case "no list":
                return b"\xc1"
            case "short":
                return msgpack.packb(parts[:-1])
            case "another place":
                return some
            case "no settlement":
                return msgpack.packb([*parts[:4], None, *parts[5:]])
        return msgpack.packb([*parts[:4], msgpack.packb(to_record(Abandon())), *parts[5:]])

    change_copies(results, changed)
    found = [run for _, run in pairs(results)]
    assert list(map(shown, found)) == list(map(shown, results.recent()))
    assert {run.outcome.settlement for run in found if run and run.outcome} == {Complete()}


@pytest.mark.parametrize("page", [2, 7, 50])
def test_states_that_share_a_range_are_listed_in_order_however_many_they_are(
    store: Store, monkeypatch: pytest.MonkeyPatch, page: int
) -> None:
    monkeypatch.setattr(runlines, "FIRST_PAGE", page)
    results = tables(store)
    number = 0
    for state, count in zip(runlines.ENDED, (20, 1, 9, 12, 3, 30), strict=True):
        for _ in range(count):
            number += 7
            record(results, number % 76, state)
    found = [(line.task_id, line.state) for line, _ in pairs(results)]
    assert [each for each, _ in found] == [f"t{number:03}" for number in range(75, 0, -1)]
    middle = pairs(results)[30][0]
    rest = [(line.task_id, line.state) for line, _ in pairs(results, after=middle.place)]
    assert rest == found[31:]


def test_rows_of_another_program_between_the_states_are_passed_over(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(runlines, "FIRST_PAGE", 3)
    results = tables(store)
    fill(results)
    place = count_down(7200.0 * 20.5)
    for shard in range(SHARDS):
        for state in ("cancelled", "deferred", "expired-", "soon"):
            for number in range(4):
                partition = f"i-{shard}-{state}-{hours(0.0)}"
                row = {"PartitionKey": partition, "RowKey": f"{place}-{number:024x}", "x": 1}
                results._requests.put(TimeBudget(), row)
    found = [line.task_id for line, run in pairs(results) if run and not run.damage]
    assert found == [f"t{number:03}" for number in range(40, 0, -1)]


def test_a_first_page_costs_three_requests_for_each_shard(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    results = tables(store)
    fill(results)
    query, asked = results._requests.query, list[Any]()

    def noting(*given: Any) -> Any:
        asked.append(given)
        return query(*given)

    monkeypatch.setattr(results._requests, "query", noting)
    place = results.lines(everyone=True).more(SECONDS)[20].place
    assert len(asked) == 2 + 3 * SHARDS, "with those for the owners"
    results.lines(after=place, everyone=True).more(SECONDS)
    assert len(asked) == 2 + (3 + 5) * SHARDS, "owners are remembered"


@pytest.mark.parametrize("page", [3, 5])
def test_behind_a_place_in_a_busy_hour_the_rest_of_the_hour_is_asked_for(
    store: Store, monkeypatch: pytest.MonkeyPatch, page: int
) -> None:
    """By its one partition: else the service reads all newer rows of the hour, too."""
    monkeypatch.setattr(runlines, "FIRST_PAGE", page)
    monkeypatch.setattr(runlines, "_TOLD_BY", 2)
    monkeypatch.setattr(runlines, "PAGE", 10)
    results = tables(store)
    for number in range(120):  # two hours, a minute each
        state = State.FAILED if number % 40 == 7 else State.SUCCEEDED
        record(results, number, state, at=7200.0 * 5 + 60.0 * number)
    lines = [line for line, _ in pairs(results)]
    assert [line.task_id for line in lines] == [f"t{number:03}" for number in range(119, -1, -1)]
    query, filters = results._requests.query, list[str]()

    def noting(call: Any, text: str, *given: Any) -> Any:
        filters.append(text)
        return query(call, text, *given)

    monkeypatch.setattr(results._requests, "query", noting)
    for place in (0, 1, 30, 58, 59, 60, 61, 100, 118, 119):
        del filters[:]
        rest = [line for line, _ in pairs(results, after=lines[place].place)]
        assert rest == lines[place + 1 :]
        assert runlines._HOUR in filters


def test_a_line_of_an_older_release_tells_nothing_and_its_run_everything(store: Store) -> None:
    results = tables(store)
    fill(results, 3)
    for row in index_rows(results):
        results._requests.put(
            TimeBudget(), {k: v for k, v in row.items() if k not in (*SUMMARY, COPY)}
        )
    found = pairs(results)
    assert [shown(run) for _, run in found] == list(map(shown, results.recent()))
    for line, _ in found:
        assert (line.task, line.queue, line.worker, line.error, line.duration) == (None,) * 5


def test_a_run_that_is_gone_is_none(store: Store) -> None:
    results = tables(store)
    fill(results, 2)
    without_copies(results)
    row = next(each for each in index_rows(results) if each["partition"] == "t-t001")
    results._requests.delete(TimeBudget(), row["partition"], row["row"])
    assert {line.task_id: run is None for line, run in pairs(results)} == {
        "t001": True,
        "t002": False,
    }


def test_a_long_error_is_not_in_the_index(store: Store) -> None:
    results = tables(store)
    record(results, 1, State.FAILED, "x" * LONGEST_ERROR)
    ((line, run),) = pairs(results)
    assert line.error is None and line.task == "shop.task1"
    assert run is not None and run.outcome is not None and len(run.outcome.error) == LONGEST_ERROR


def test_an_encrypted_error_is_not_in_the_index(store: Store) -> None:
    tables(store)
    keys = RowSignatures(cipher=Cipher([b"a-key-with-enough-bytes-in-it-0123456789"], encrypt=True))
    results = store.of(MINE, keys)
    assert isinstance(results, TablesResults)
    record(results, 1, State.FAILED, "the secret")
    ((line, run),) = pairs(results)
    assert line.error is None
    assert run is not None and run.outcome is not None and run.outcome.error == "the secret"
    assert "the secret" not in str(index_rows(results))
