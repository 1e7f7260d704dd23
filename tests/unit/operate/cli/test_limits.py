import json
import sys

import pytest

from aztask.app.loading import load_app
from aztask.limits.claiming import Claims, Wanted
from aztask.limits.permits import Permits
from aztask.limits.storeclock import StoreClock
from aztask.stores.records.controls import EntryChange, controls_of
from aztask.support.clock import SYSTEM_CLOCK

MODULE = """
from aztask import App

app = App("limited", broker="{address}", results="{address}")
app.limit("api", rate="1/m", burst=2)
app.limit("tokens", rate="90000/m", cost=len)
app.limit("five", concurrency=5)
app.limit("tenant", rate="1/m", concurrency=2, key=lambda tenant: tenant)
"""


@pytest.fixture
def limited(cli, tmp_path, monkeypatch):
    (tmp_path / "limited_app.py").write_text(MODULE.format(address=cli.address))
    monkeypatch.syspath_prepend(str(tmp_path))
    sys.modules.pop("limited_app", None)
    app = load_app("limited_app:app")
    yield app
    app.close()
    sys.modules.pop("limited_app", None)


def rows(cli, *words):
    answer = cli("-A", "limited_app:app", "limits", *words, "--json")
    assert answer.code == 0, answer.err
    return {each["limit"]: each for each in map(json.loads, answer.out.splitlines())}


def test_limits_that_nothing_uses(cli, limited):
    found = rows(cli)
    assert found["api"]["wait_seconds"] == 0.0
    assert found["api"]["rate"] == {"count": 1, "period_seconds": 60.0}
    assert found["five"]["held"] == {}
    assert found["tenant"]["wait_seconds"] is None
    assert found["tenant"]["keyed"]
    table = cli("-A", "limited_app:app", "limits").out.splitlines()
    assert table[0].split() == ["LIMIT", "RATE", "BURST", "COST", "WAIT", "RUNNING", "MOST"]
    assert table[1].split() == ["api", "1/60s", "2", "1", "0s", "-", "-"]
    assert table[2].split() == ["tokens", "90000/60s", "90000", "each", "0s", "-", "-"]
    assert "for each key" in table[4]
    assert [found[name]["weighed"] for name in ("api", "tokens", "five")] == [False, True, False]


def test_limits_in_use(cli, limited):
    store = controls_of(limited.results)
    time = StoreClock(store, SYSTEM_CLOCK)
    time.refresh()
    limits = limited.limits
    Claims(store, time).claim(
        Wanted(limits["api"].entry(""), limits["api"].rate, [1] * 4), time.now()
    )
    permits = Permits(store, time, "one", SYSTEM_CLOCK)
    permits.take(limits["five"].permits_entry(""), 5, time.now(), wanted=3)
    permits.take(limits["tenant"].permits_entry("acme"), 2, time.now())
    found = rows(cli)
    assert 100.0 < found["api"]["wait_seconds"] <= 181.0
    assert found["five"]["held"] == {"one": 3}
    (tenant,) = rows(cli, "tenant", "--key", "acme").values()
    assert (tenant["held"], tenant["wait_seconds"]) == ({"one": 1}, 0.0)


def test_a_damaged_entry_is_named(cli, limited):
    store = controls_of(limited.results)
    store.write([EntryChange(limited.limits["five"].permits_entry(""), b"damaged")])
    answer = cli("-A", "limited_app:app", "limits", "five")
    assert "aztask: limit five: the entry of a limit is damaged" in answer.err


@pytest.mark.parametrize(
    ("words", "code"),
    [(("apj",), 5), (("--key", "x"), 2), (("api", "--key", "x"), 2)],
)
def test_wrong_names(cli, limited, words, code):
    assert cli("-A", "limited_app:app", "limits", *words).code == code
