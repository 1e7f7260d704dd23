"""The index of ended runs: how its rows are named and read."""

from dataclasses import replace

from aztask.settlement import Complete
from aztask.stores.records.base import Outcome, RunKey, Start, State
from aztask.stores.records.tables.index import entity_of, entry_of
from aztask.stores.records.tables.rows import new_run

START = Start(RunKey("a"), "shop.add", "default", 7, "owner", "w", 1.0)


def ended(at, key=START.key):
    outcome = Outcome(State.SUCCEEDED, Complete(), at=at)
    return new_run(replace(START, key=key)).finished(outcome, None, "")


def test_the_newest_comes_first_within_an_hour_and_across_hours():
    times = [1.7e9 + 7200.0, 1.7e9 + 3600.0, 1.7e9 + 1.0, 1.7e9]
    rows = [entity_of(ended(at)) for at in times]
    places = [(row["PartitionKey"], row["RowKey"]) for row in rows]
    assert places == sorted(places)
    assert places[0][0].startswith("i-")
    assert "-succeeded-" in places[0][0]


def test_impossible_times_still_have_a_place():
    for at in (-5.0, 0.0, 1e30):
        assert entry_of(entity_of(ended(at))).damage == ""


def test_a_row_names_its_run_or_is_damaged():
    entity = entity_of(ended(1.7e9))
    entry = entry_of(entity)
    assert (entry.run_partition, entry.run_row) == (entity["partition"], entity["row"])
    for change in ({"partition": 7}, {"partition": "w"}, {"row": "x"}, {"blob": "another"}):
        assert entry_of({**entity, **change}).damage
