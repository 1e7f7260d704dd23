"""The store in Azure Tables, as far as it needs no service: the contract suite has the rest."""

import pytest

from aztask.address.urls import parse_results
from aztask.errors import CapabilityError
from aztask.stores.records.base import ResultStore, State
from aztask.stores.records.tables.store import TablesResults

KEY = "c2VjcmV0"
ADDRESS = parse_results(f"DefaultEndpointsProtocol=https;AccountName=shop;AccountKey={KEY}")


def test_it_connects_with_the_first_call_and_shows_no_key():
    results = TablesResults(ADDRESS)
    assert isinstance(results, ResultStore)
    assert results.remote
    assert KEY not in repr(results)
    results.close()


@pytest.mark.parametrize("state", [State.PENDING, State.STARTED])
def test_only_ended_runs_can_be_listed(state):
    results = TablesResults(ADDRESS)
    with pytest.raises(CapabilityError, match="list only ended runs"):
        results.recent(state=state)
    results.close()


def test_waiting_for_a_change_takes_longer_each_time():
    results = TablesResults(ADDRESS)
    assert results.wait_changed(0, 0.001) == 1
    assert results.wait_changed(7, 0.001) == 8
    results.close()
