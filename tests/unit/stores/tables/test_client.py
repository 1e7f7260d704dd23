"""Requests to tables: which are repeated, and how long a call may take."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator

import pytest
from azure.core.exceptions import (
    AzureError,
    ServiceResponseError,
)
from tableanswers import answered

from aztask.errors import BrokerUnavailable, ConfigurationError
from aztask.stores.connections import Connections
from aztask.stores.tables.client import TimeBudget
from aztask.stores.tables.errors import (
    OutcomeUnknown,
)
from aztask.support import clock as clocks
from aztask.support.clock import Clock

PLACE, ROLE = "the table 't' of tables://shop", "Storage Table Data Contributor"


@pytest.fixture
def pauses() -> Iterator[list[float]]:
    made: list[float] = []
    with clocks.replaced(Clock(monotonic=_now, sleep=made.append)):
        yield made


def _now() -> float:
    return 1000.0


def failing(*errors: AzureError) -> Callable[..., str]:
    """A request that ends with each of these once, and then well."""
    left = list(errors)

    def make(**times: float) -> str:
        assert set(times) == {"connection_timeout", "read_timeout"}
        if left:
            raise left.pop(0)
        return "done"

    return make


def test_a_busy_service_is_asked_again_after_pauses(pauses: list[float]) -> None:
    busy = answered(503, "ServerBusy")
    assert TimeBudget().request(failing(busy, busy, busy), PLACE, ROLE) == "done"
    assert pauses == [0.1, 0.4, 1.0]
    with pytest.raises(BrokerUnavailable, match="cannot be reached now"):
        TimeBudget().request(failing(*[busy] * 4), PLACE, ROLE)


def test_a_write_that_is_unsure_is_not_made_again_and_a_read_is(pauses: list[float]) -> None:
    lost = ServiceResponseError("reset")
    with pytest.raises(OutcomeUnknown):
        TimeBudget().request(failing(lost), PLACE, ROLE)
    assert pauses == []
    assert TimeBudget().request(failing(lost, lost), PLACE, ROLE, again=True) == "done"


def test_once_a_request_gave_up_no_other_one_of_the_call_is_made(pauses: list[float]) -> None:
    call = TimeBudget()
    with pytest.raises(ConfigurationError):
        call.request(failing(answered(403, "AuthorizationFailure")), PLACE, ROLE)
    with pytest.raises(ConfigurationError):
        call.request(failing(), PLACE, ROLE)


def test_a_call_without_time_makes_no_request(pauses: list[float]) -> None:
    with pytest.raises(BrokerUnavailable, match="does not answer in time; try again"):
        TimeBudget(0.0).request(failing(), PLACE, ROLE)
    with pytest.raises(BrokerUnavailable, match="ServerBusy"):
        TimeBudget(0.05).request(failing(answered(503, "ServerBusy")), PLACE, ROLE)
    assert pauses == [], "a pause that is longer than what is left is not begun"


def test_the_last_request_of_a_call_gets_the_time_that_is_left(pauses: list[float]) -> None:
    times = TimeBudget(3.0).request(lambda **times: times, PLACE, ROLE)
    assert times == {"connection_timeout": 3.0, "read_timeout": 3.0}
    assert TimeBudget(60.0).timeouts(PLACE) == {"connection_timeout": 5.0, "read_timeout": 10.0}


def test_a_missing_package_is_one_line_with_the_command(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "azure.data.tables", None)
    for name in [name for name in sys.modules if name.startswith("aztask.stores.records.tables")]:
        monkeypatch.delitem(sys.modules, name)
    connections = Connections("local://:memory:", "tables://myaccount")
    with pytest.raises(ConfigurationError) as caught:
        connections.results()
    assert str(caught.value) == (
        "results in Azure Tables need a package that is missing (azure.data.tables); install it "
        'with: pip install "aztask[tables]"'
    )
