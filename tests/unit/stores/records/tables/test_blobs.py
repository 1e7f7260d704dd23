"""Values beside a table: what stays in the row, and how blobs are named."""

from aztask.address.urls import parse_results
from aztask.stores.records.base import RunKey
from aztask.stores.records.tables.blobs import Blobs, hour_of, missing
from aztask.stores.tables.client import TimeBudget
from aztask.support.clock import SYSTEM_CLOCK


def test_small_values_need_no_connection():
    account = parse_results("UseDevelopmentStorage=true")
    blobs = Blobs(account, "values", SYSTEM_CLOCK)
    call = TimeBudget()
    for data in (None, b"", b"x" * 1000):
        assert blobs.place_of(call, RunKey("a"), data) == (data, "")
        assert blobs.load(call, data, "") == data
    blobs.delete("", "")
    assert "values" in blobs.place


def test_hours_sort_as_times_do():
    times = [0.0, 3599.0, 3600.0, 86400.0, 1.7e9]
    hours = [hour_of(at) for at in times]
    assert hours == sorted(hours)
    assert (hours[0], hours[1] == hours[0]) == ("1970010100", True)
    assert "blob x" in missing("x")
