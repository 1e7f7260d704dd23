"""The document of open circuit breakers, changed by several workers."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from aztask.errors import BrokerUnavailable, ConfigurationError
from aztask.limits.breakers import NAME, PROBE_SECONDS, Breakers, OpenBreaker
from aztask.limits.control import UnreadableControls
from aztask.queues.engine import Database
from aztask.stores.records.controls import EntryChange
from aztask.stores.records.local.store import LocalResults

ROW = OpenBreaker("shop.pay", 100.0, 130.0, "one", "6 of 10 runs failed in 60 s")


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Any]:
    database = Database(str(tmp_path / "results.db"))
    yield LocalResults(database).controls
    database.close()


@pytest.fixture
def breakers(store: Any) -> Breakers:
    return Breakers(store)


def test_of_two_workers_the_first_opens_it(breakers: Breakers) -> None:
    assert breakers.read() == {}
    assert breakers.open(ROW) == {"shop.pay": ROW}
    other = OpenBreaker("shop.pay", 101.0, 999.0, "two", "9 of 10")
    assert breakers.open(other) == {"shop.pay": ROW}
    assert breakers.read() == {"shop.pay": ROW}


def test_one_worker_probes_and_only_when_it_is_time(breakers: Breakers) -> None:
    breakers.open(ROW)
    assert breakers.probe("shop.pay", "two", 129.9)["shop.pay"].probe_by == ""
    row = breakers.probe("shop.pay", "two", 130.0)["shop.pay"]
    assert (row.probe_by, row.probe_until) == ("two", 130.0 + PROBE_SECONDS)
    assert row.probed(144.9)
    assert not row.probed(145.0)
    assert breakers.probe("shop.pay", "three", 144.9)["shop.pay"].probe_by == "two"
    assert breakers.probe("shop.pay", "two", 140.0)["shop.pay"].probe_until == 155.0
    assert breakers.probe("shop.pay", "three", 155.0)["shop.pay"].probe_by == "three"
    assert breakers.probe("shop.other", "three", 155.0).keys() == {"shop.pay"}


def test_a_row_without_a_prober_is_not_probed_whatever_its_times_say() -> None:
    row = replace(ROW, probe_until=999.0)
    assert not row.probed(150.0)
    assert replace(row, probe_by="two").probed(150.0)


def test_the_lease_of_a_probe_lasts_fifteen_seconds(breakers: Breakers) -> None:
    breakers.open(ROW)
    assert breakers.probe("shop.pay", "two", 200.0)["shop.pay"].probe_until == 215.0


def test_each_failed_probe_counts(breakers: Breakers) -> None:
    breakers.open(ROW)
    for number in (1, 2, 3):
        breakers.probe("shop.pay", "two", 1000.0 * number)
        row = breakers.failed("shop.pay", "two", 1000.0 * number + 5.0)["shop.pay"]
        assert row == replace(ROW, failures=number, until=1000.0 * number + 5.0)


def test_of_several_breakers_only_the_one_that_is_meant_changes(breakers: Breakers) -> None:
    other = replace(ROW, task="shop.ship")
    breakers.open(ROW)
    breakers.open(other)
    breakers.probe("shop.pay", "two", 130.0)
    breakers.succeeded("shop.pay", "two")
    assert breakers.read() == {"shop.ship": other}
    assert breakers.released("shop.pay", "two") == {"shop.ship": other}
    assert breakers.failed("shop.pay", "two", 5.0) == {"shop.ship": other}


def test_what_changes_nothing_is_not_written(store: Any, breakers: Breakers) -> None:
    breakers.open(ROW)
    (before,) = store.read([NAME])
    breakers.open(ROW)
    breakers.probe("shop.pay", "two", 1.0)
    breakers.succeeded("shop.pay", "two")
    breakers.failed("shop.pay", "two", 5.0)
    breakers.released("shop.other", "two")
    assert store.read([NAME]) == [before]


def test_a_document_is_that_of_every_release(store: Any, breakers: Breakers) -> None:
    breakers.open(ROW)
    (entry,) = store.read([NAME])
    record = json.loads(entry.data)
    assert record.keys() == {"v", "write", "open"}
    assert (record["v"], record["open"]) == (
        1, [["shop.pay", 100.0, 130.0, "one", "6 of 10 runs failed in 60 s", 0, "", 0.0]],
    )  # fmt: skip
    assert b" " not in entry.data.replace(ROW.why.encode(), b"")


def test_only_the_holder_of_the_probe_decides(breakers: Breakers) -> None:
    breakers.open(ROW)
    breakers.probe("shop.pay", "two", 130.0)
    for method in (breakers.succeeded, breakers.released):
        assert method("shop.pay", "one")["shop.pay"].probe_by == "two"
    assert breakers.failed("shop.pay", "one", 999.0)["shop.pay"].until == 130.0
    row = breakers.failed("shop.pay", "two", 190.0)["shop.pay"]
    assert (row.failures, row.until, row.probe_by, row.probe_until) == (1, 190.0, "", 0.0)
    breakers.probe("shop.pay", "one", 190.0)
    row = breakers.released("shop.pay", "one")["shop.pay"]
    assert (row.failures, row.until, row.probe_by) == (1, 190.0, "")
    breakers.probe("shop.pay", "one", 190.0)
    assert breakers.succeeded("shop.pay", "one") == {}
    assert breakers.succeeded("shop.pay", "one") == {}


def test_an_operator_closes_them(breakers: Breakers) -> None:
    breakers.open(ROW)
    assert breakers.close(["shop.other"]) == []
    assert breakers.close(["shop.other", "shop.pay"]) == [ROW]
    assert breakers.close_all() == []
    breakers.open(ROW)
    assert breakers.close_all() == [ROW]
    assert breakers.read() == {}


def test_a_change_by_another_program_is_not_lost(store: Any, breakers: Breakers) -> None:
    others = Breakers(store)

    class Racing:
        def read(self, names: Any) -> Any:
            found = store.read(names)
            if not others.read():
                others.open(OpenBreaker("shop.other", 1.0, 2.0, "two", "1 of 1"))
            return found

        def write(self, changes: Any) -> Any:
            return store.write(changes)

    racing: Any = Racing()
    assert Breakers(racing).open(ROW).keys() == {"shop.other", "shop.pay"}
    assert breakers.read().keys() == {"shop.other", "shop.pay"}


@pytest.mark.parametrize(
    "data",
    [
        b"\xff",
        b"[]",
        b'{"v":1}',
        b'{"v":1,"open":[["a"]]}',
        b'{"v":1,"open":[["a",NaN,1,"b","c",0,"",0]]}',
        b'{"v":1,"open":[["a",true,1,"b","c",0,"",0]]}',
        b'{"v":1,"open":[[7,1,1,"b","c",0,"",0]]}',
    ],
)
def test_a_damaged_document_is_replaced_by_resume_all(
    data: bytes, store: Any, breakers: Breakers
) -> None:
    store.write([EntryChange(NAME, data)])
    with pytest.raises(UnreadableControls, match="resume --all"):
        breakers.read()
    with pytest.raises(UnreadableControls):
        breakers.open(ROW)
    assert breakers.close_all() == []
    assert breakers.read() == {}


def test_a_document_of_a_newer_release_is_left_alone(store: Any, breakers: Breakers) -> None:
    store.write([EntryChange(NAME, json.dumps({"v": 2}).encode())])
    with pytest.raises(UnreadableControls, match="newer release"):
        breakers.open(ROW)


def test_more_than_one_entry_holds_are_refused(breakers: Breakers) -> None:
    for number in range(28):
        breakers.open(OpenBreaker(f"{number:02}{'x' * 2000}", 1.0, 2.0, "w", "why"))
    with pytest.raises(ConfigurationError, match="too many circuit breakers"):
        for number in range(28, 60):
            breakers.open(OpenBreaker(f"{number:02}{'x' * 2000}", 1.0, 2.0, "w", "why"))


def test_a_document_that_others_never_stop_changing_is_an_outage(store: Any) -> None:
    class Busy:
        def read(self, names: Any) -> Any:
            return store.read(names)

        def write(self, changes: Any) -> Any:
            return [None]

    busy: Any = Busy()
    with pytest.raises(BrokerUnavailable, match="keep changing the circuit breakers"):
        Breakers(busy).open(ROW)
    Breakers(store).open(ROW)
    with pytest.raises(BrokerUnavailable, match="keep changing the circuit breakers"):
        Breakers(busy).close_all()
