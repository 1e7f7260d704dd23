"""The numbers of a limit that operators change while workers run."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from aztask import App
from aztask.errors import ConfigurationError, CostTooLarge
from aztask.limits.control import Controls, ControlState, Reach, Scope, UnreadableControls
from aztask.limits.declaration import LimitChange, Rate, change_of, limit_of, read_change
from aztask.limits.rates import LIVES_SECONDS, RateState
from aztask.stores.records.controls import ControlStore, EntryChange, controls_of

API = limit_of("api", rate="10/s", burst=3, concurrency=5)
NOW = 1_793_404_800.0


@pytest.fixture
def store(tmp_path: Path) -> ControlStore:
    app = App("shop", broker=f"local://{tmp_path}/q.db", results=f"local://{tmp_path}/r.db")
    found = controls_of(app.results)
    assert found is not None
    return found


def test_what_is_not_given_stays_as_declared() -> None:
    faster = change_of("shop", API, NOW, rate="600/m")
    assert faster.applied(API).rate == Rate(600, 60.0, 3)
    assert faster.applied(API).concurrency == 5
    assert faster.numbers == "rate 600/60s"
    narrow = change_of("shop", API, NOW, burst=1, concurrency=2).applied(API)
    assert (narrow.rate, narrow.concurrency) == (Rate(10, 1.0, 1), 2)
    assert narrow.changed_at == NOW


def test_a_call_that_the_declaration_accepts_stays_accepted() -> None:
    """Senders know nothing of the change, and what waits in the queue was accepted."""
    declared = limit_of("tokens", rate="900/m", burst=100, cost=lambda cost: cost)
    narrow = change_of("shop", declared, NOW, burst=10).applied(declared)
    assert narrow.rate == Rate(900, 60.0, 10)
    assert narrow.cost_of({"cost": 100}) == 100
    with pytest.raises(CostTooLarge, match="costs 101, but at most 100"):
        narrow.cost_of({"cost": 101})
    wide = change_of("shop", declared, NOW, burst=500).applied(declared)
    assert wide.cost_of({"cost": 500}) == 500


def test_a_burst_that_is_not_declared_follows_the_rate_of_a_limit_with_a_cost() -> None:
    declared = limit_of("tokens", rate="900/m", cost=lambda cost: cost)
    slow = change_of("shop", declared, NOW, rate="90/m").applied(declared)
    assert slow.rate == Rate(90, 60.0, 90), "or ten minutes' worth would come at once"
    assert slow.cost_of({"cost": 900}) == 900


def test_no_burst_is_larger_than_what_the_changed_limit_counts() -> None:
    assert change_of("shop", API, NOW, burst=10).burst == 10
    assert change_of("shop", API, NOW, rate="50/s", burst=50).burst == 50
    assert change_of("shop", API, NOW, rate="1/s", burst=3).burst == 3, "it is declared"
    error = "limit 'api': burst 11 is more than its rate counts, 10, and than the declared burst, 3"
    with pytest.raises(ConfigurationError, match=error):
        change_of("shop", API, NOW, burst=11)
    with pytest.raises(ConfigurationError, match="burst 4 is more than its rate counts, 1"):
        change_of("shop", API, NOW, rate="1/s", burst=4)


def test_a_deploy_that_takes_the_rate_away_ends_its_change() -> None:
    change = change_of("shop", API, NOW, rate="5/s", concurrency=2)
    now = change.applied(limit_of("api", concurrency=7))
    assert (now.rate, now.concurrency) == (None, 2)


@pytest.mark.parametrize(
    ("given", "error"),
    [
        ({"rate": "5/x"}, "rate takes a text"),
        ({"rate": "0/s"}, "rate takes a text"),
        ({"burst": 0}, "burst takes a whole number above 0"),
        ({"concurrency": -1}, "concurrency takes a whole number above 0"),
    ],
)
def test_numbers_that_no_limit_has_are_refused(given: dict[str, object], error: str) -> None:
    with pytest.raises(ConfigurationError, match=error):
        change_of("shop", API, NOW, **given)


def test_what_it_does_not_declare_it_does_not_get() -> None:
    with pytest.raises(ConfigurationError, match="declares no rate"):
        change_of("shop", limit_of("five", concurrency=5), NOW, rate="5/s")
    with pytest.raises(ConfigurationError, match="declares no concurrency"):
        change_of("shop", limit_of("ten", rate="10/s"), NOW, concurrency=5)


def test_it_is_kept_beside_pauses_and_scales_until_its_reset(store: ControlStore) -> None:
    controls = Controls(store)
    assert controls.change_limit(change_of("shop", API, NOW)) == [], "there is none to reset"
    (made,) = controls.change_limit(change_of("shop", API, NOW, rate="1/m", concurrency=1))
    assert "@" in made.by
    controls.pause(Scope.QUEUE, ["orders"], NOW)
    controls.scale(Reach.ALL, [""], 4, NOW, forget=frozenset())
    state = Controls(store).read()
    assert state.limit("shop", API).rate == Rate(1, 60.0, 3)
    assert state.limit("other", API) == API, "another app's limit of this name"
    controls.resume_all()
    controls.unscale(None, ())
    assert Controls(store).read().limits == state.limits
    (reset,) = controls.change_limit(change_of("shop", API, NOW + 5))
    assert not reset.numbers
    assert controls.change_limit(change_of("shop", API, NOW + 6)) == []
    again = Controls(store).read().limit("shop", API)
    assert (again.rate, again.concurrency, again.changed_at) == (API.rate, 5, NOW + 5)


def test_a_reset_is_forgotten_when_the_numbers_before_it_are(store: ControlStore) -> None:
    controls, other = Controls(store), limit_of("other", rate="1/s")
    controls.change_limit(change_of("shop", API, NOW, rate="1/m"))
    controls.change_limit(change_of("shop", API, NOW))
    late = NOW + LIVES_SECONDS
    controls.change_limit(change_of("shop", other, late, rate="2/s"))
    assert set(controls.read().limits) == {("shop", "api"), ("shop", "other")}
    controls.change_limit(change_of("shop", other, late + 1, rate="3/s"))
    assert set(controls.read().limits) == {("shop", "other")}


def test_both_states_together_keep_the_own_change() -> None:
    own, former = (change_of("shop", API, at, concurrency=2) for at in (NOW, NOW - 9))
    key = "shop", "api"
    both = ControlState(limits={key: own}).over(ControlState(limits={key: former}))
    assert both.limits == {key: own}
    assert ControlState(limits={key: own})


CHANGE = ["shop", "api", 5, 1.0, 2, 3, NOW, "ann@host"]


def changed(index: int, value: object) -> list[object]:
    return [*CHANGE[:index], value, *CHANGE[index + 1 :]]


def test_it_is_read_as_it_was_written() -> None:
    change = LimitChange("shop", "api", 5, 1.0, 2, 3, NOW, "ann@host")
    assert change.packed() == CHANGE
    assert read_change(CHANGE) == change
    assert read_change(["", "api", None, None, None, None, 1, ""]).numbers == ""


@pytest.mark.parametrize(
    "record",
    [
        CHANGE[:7],
        changed(0, 1),
        changed(1, None),
        changed(2, "5"),
        changed(2, True),
        changed(2, None),
        changed(3, None),
        changed(3, 0.0),
        changed(3, float("nan")),
        changed(3, 1e9),
        changed(4, 0),
        changed(5, 1.5),
        changed(6, float("inf")),
        changed(6, False),
        changed(7, None),
    ],
    ids=str,
)
def test_a_damaged_one_is_an_error(store: ControlStore, record: list[object]) -> None:
    data = json.dumps({"v": 1, "pauses": [], "limits": [CHANGE, record]}).encode()
    assert store.write([EntryChange("control", data, None)]) != [None]
    with pytest.raises(UnreadableControls, match="resume --all"):
        Controls(store).read()


def test_changed_numbers_count_at_once_and_so_do_the_declared_ones_again() -> None:
    """Beside workers that claim with others: of a deploy, and those that do not know yet."""
    declared, slow = Rate(10, 1.0), Rate(1, 1.0)
    state, used = RateState(0.0).under(declared, 100.0, started_at=90.0)
    assert used == declared
    state, used = state.under(slow, 200.0, started_at=80.0, changed_at=199.0)
    assert used == slow
    state, used = state.under(declared, 201.0, started_at=150.0)
    assert used == slow, "a worker that has not read the change yet"
    state, used = state.under(declared, 202.0, started_at=80.0, changed_at=202.0)
    assert used == declared, "reset"
    state, used = state.under(slow, 203.0, started_at=80.0, changed_at=199.0)
    assert used == declared, "a worker that has not read the reset yet"
    state, used = state.under(slow, 204.0, started_at=80.0, changed_at=204.0)
    assert used == slow, "set once more"
