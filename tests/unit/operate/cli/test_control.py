import itertools
import json
import time
from dataclasses import replace

import pytest

from aztask.address.owner import NO_OWNER, Owner
from aztask.errors import ConfigurationError
from aztask.limits.breakers import Breakers, OpenBreaker
from aztask.limits.control import Controls, Scope
from aztask.limits.declaration import Limit
from aztask.limits.permits import Permits
from aztask.limits.storeclock import StoreClock
from aztask.operate import draining
from aztask.stores.records.base import RunningTask, WorkerRecord
from aztask.support.clock import SYSTEM_CLOCK


def listed(cli):
    return [json.loads(line) for line in cli("control", "list", "--json").out.splitlines()]


def test_pause_list_and_resume(cli, filled):
    answer = cli("control", "pause", "-Q", "orders,bulk", "--task", "shop.add")
    assert answer.out.splitlines() == [
        "queue orders is paused; workers obey within 5 seconds",
        "queue bulk is paused; workers obey within 5 seconds",
        "task shop.add is paused; workers obey within 5 seconds",
    ]
    assert {(each["scope"], each["name"]) for each in listed(cli)} == {
        ("queue", "orders"),
        ("queue", "bulk"),
        ("task", "shop.add"),
    }
    assert all("@" in each["by"] for each in listed(cli))
    again = cli("control", "pause", "-Q", "orders")
    assert again.out == "queue orders is paused already\n"
    table = cli("control").out.splitlines()
    assert table[0].split() == ["WHAT", "NAME", "PAUSED", "BY"]
    assert table[1].split()[0] == "queue"
    answer = cli("control", "resume", "-Q", "orders", "-t", "shop.add,shop.other")
    assert answer.out.splitlines() == [
        "task shop.other is not paused",
        "queue orders is resumed",
        "task shop.add is resumed",
    ]
    assert cli("control", "resume", "--all").out == "queue bulk is resumed\n"
    assert cli("control", "resume", "--all").out == "nothing is paused\n"


def test_what_an_earlier_release_paused_is_named_and_can_be_resumed(cli, filled):
    mine = filled.results.controls
    Controls(mine.of(NO_OWNER)).pause(Scope.QUEUE, ["orders"], 5.0)
    Controls(mine).pause(Scope.QUEUE, ["bulk"], 6.0)
    marked = {each["name"]: each["every_broker"] for each in listed(cli)}
    assert marked == {"orders": True, "bulk": False}
    assert "for every broker of the result store: queue orders;" in cli("control").err
    assert cli("control", "resume", "-Q", "orders").out == "queue orders is resumed\n"
    assert [each["name"] for each in listed(cli)] == ["bulk"]
    assert "every broker" not in cli("control").err


def test_breakers_of_all_apps_of_the_broker_are_listed_and_closed(cli, filled):
    mine = filled.results.controls
    row = OpenBreaker("other.add", time.time() - 60.0, time.time() + 30.0, "w", "6 of 10 failed")
    Breakers(mine.of(Owner(mine.owner.broker, "other"))).open(row)
    Breakers(mine.of(Owner("local://elsewhere", "other"))).open(replace(row, task="far.add"))
    (found,) = listed(cli)
    assert (found["name"], found["app"]) == ("other.add", "other")
    answer = cli("control", "resume", "--all")
    assert answer.out == "the circuit breaker of task other.add is closed\n"


def test_open_circuit_breakers_are_listed_and_closed(cli, filled):
    breakers = Breakers(filled.results.controls)
    row = OpenBreaker("shop.add", time.time() - 60.0, time.time() + 30.0, "w", "6 of 10 failed", 2)
    breakers.open(row)
    breakers.open(replace(row, task="shop.other"))
    first = listed(cli)[0]
    assert (first["scope"], first["name"], first["by"]) == ("breaker", "shop.add", "w")
    assert (first["reason"], first["failed_probes"]) == ("6 of 10 failed", 2)
    assert first["next_probe_at"] > first["paused_at"]
    line = cli("control").out.splitlines()[1]
    assert line.split()[:2] == ["breaker", "shop.add"]
    assert line.endswith("w: 6 of 10 failed")
    answer = cli("control", "resume", "-t", "shop.add,shop.nothing")
    assert answer.out.splitlines() == [
        "task shop.nothing is not paused",
        "the circuit breaker of task shop.add is closed",
    ]
    answer = cli("control", "resume", "--all")
    assert answer.out == "the circuit breaker of task shop.other is closed\n"
    assert cli("control", "resume", "--all").out == "nothing is paused\n"


@pytest.mark.parametrize(
    "words",
    [
        ("pause",),
        ("drain",),
        ("resume",),
        ("resume", "--all", "-Q", "orders"),
        ("pause", "-Q", ""),
    ],
)
def test_without_a_name_nothing_is_done(cli, filled, words):
    assert cli("control", *words).code == 2
    assert listed(cli) == []


def test_json_belongs_after_the_command(cli, filled):
    answer = cli("control", "--json", "pause", "-Q", "orders")
    assert answer.code == 2
    assert "aztask control list --json" in answer.err


@pytest.fixture
def quick(monkeypatch):
    monkeypatch.setattr(draining, "OBEYED_SECONDS", 0.1)
    monkeypatch.setattr(draining, "LOOK_SECONDS", 0.02)
    monkeypatch.setattr(draining, "SILENT_SECONDS", 0.2)


def beat(app, *tasks, at=0.0, name="one", **more):
    running = tuple(RunningTask(f"id-{n}", task, "bulk", 1.0) for n, task in enumerate(tasks))
    seen_at = time.time() + at
    record = WorkerRecord(name, 1.0, seen_at, ("bulk",), len(tasks), 0, tasks=running)
    app.results.heartbeat(replace(record, **more))


def test_drain_waits_for_heartbeats_of_after_the_pause(cli, filled, quick, monkeypatch):
    beats = iter([("shop.add",), ("shop.add",), ("shop.other",)])

    def sleep(seconds):
        if (tasks := next(beats, None)) is not None:
            beat(filled, *tasks, at=1.0)

    monkeypatch.setattr(draining.time, "sleep", sleep)
    beat(filled, "shop.add")
    beat(filled, "shop.add", name="stopped", stopped=True)
    answer = cli("control", "drain", "--task", "shop.add")
    assert (answer.code, answer.out.splitlines()[-1]) == (0, "no worker runs these tasks")
    assert next(beats, None) is None
    assert listed(cli)[0]["name"] == "shop.add", "it stays paused"


def test_drain_says_what_still_runs(cli, filled, quick, monkeypatch):
    names = {(Scope.QUEUE, "bulk")}
    beat(filled, "shop.add")
    assert "awaited" in draining.wait_until_idle(filled.results, names, 0.0)
    monkeypatch.setattr(draining.time, "sleep", lambda seconds: beat(filled, "shop.add", at=60.0))
    found = draining.wait_until_idle(filled.results, names, 0.1)
    assert found == "task shop.add id-0 on one"


def test_drain_waits_anew_if_the_store_did_not_answer(filled, quick, monkeypatch):
    """No heartbeat could be written either, so a silent worker may run."""
    beat(filled, "shop.add")
    workers, calls = filled.results.workers, itertools.count()

    def slow():
        if next(calls) == 1:
            time.sleep(0.4)
        return workers()

    monkeypatch.setattr(filled.results, "workers", slow)
    found = draining.wait_until_idle(filled.results, {(Scope.TASK, "shop.add")}, 0.3)
    assert "awaited" in found


def test_drain_does_not_wait_for_silent_workers(cli, filled, quick):
    beat(filled, "shop.add")
    assert draining.wait_until_idle(filled.results, {(Scope.TASK, "shop.add")}, 5.0) == ""


def test_drain_counts_running_tasks_without_a_name(cli, filled, quick):
    beat(filled, running=500)
    worker = filled.results.workers()[0]
    assert "500 unnamed tasks" in draining._running(worker, {(Scope.TASK, "shop.add")})


def test_the_doctor_warns_of_a_pause(cli, filled):
    cli("control", "pause", "-Q", "orders")
    lines = cli("doctor", "-Q", "default").out.splitlines()
    (line,) = [line for line in lines if "paused" in line]
    assert line.startswith("warning")
    assert "queue orders (since " in line
    assert "aztask control resume" in line


def test_scale_lists_and_resets(cli, filled):
    app = cli.app()
    beat(app, name="one")
    answer = cli("control", "scale", "4")
    assert answer.out == "all workers: 4 tasks at the same time; workers obey within 5 seconds\n"
    answer = cli("control", "scale", "8", "--worker", "one", "-Q", "bulk,mail")
    assert [line.partition(":")[0] for line in answer.out.splitlines()] == [
        "worker one",
        "queue bulk",
        "queue mail",
    ]
    assert [(each["scale"], each["name"], each["concurrency"]) for each in listed(cli)] == [
        ("all", "", 4),
        ("worker", "one", 8),
        ("queue", "bulk", 8),
        ("queue", "mail", 8),
    ]
    table = cli("control").out
    assert "SCALED" in table
    assert "worker one" in table
    answer = cli("control", "scale", "reset", "-Q", "bulk")
    assert answer.out.startswith("queue bulk: --concurrency applies again")
    assert cli("control", "scale", "reset", "-Q", "bulk").out == "nothing is scaled there\n"
    assert len(cli("control", "scale", "reset").out.splitlines()) == 3
    assert cli("control", "scale", "reset").out == "nothing is scaled\n"
    assert "SCALED" not in cli("control").out


def test_workers_that_have_ended_are_forgotten_and_unknown_ones_refused(cli, filled):
    app = cli.app()
    beat(app, name="one")
    assert cli("control", "scale", "4", "--worker", "one").code == 0
    beat(app, name="one", stopped=True)
    answer = cli("control", "scale", "4", "--worker", "one")
    assert answer.code == 1
    assert "no worker 'one' runs" in answer.error
    assert cli("control", "scale", "2", "-Q", "bulk").code == 0
    assert [each["scale"] for each in listed(cli)] == ["queue"]


@pytest.fixture
def limited(cli):
    cli.module(
        "limited_shop",
        "from aztask import App\n"
        f"app = App('shop', broker='{cli.address}', results='{cli.address}')\n"
        "app.limit('api', rate='10/s', burst=2, concurrency=5)\n"
        "app.limit('five', concurrency=5)\n",
    )
    return lambda *arguments: cli(*arguments, "-A", "limited_shop:app")


def test_a_limit_is_changed_listed_and_reset(cli, limited, filled):
    answer = limited("control", "limit", "api", "--rate", "5/10s", "--concurrency", "2")
    assert answer.out == "limit api: rate 5/10s, concurrency 2; workers obey within 5 seconds\n"
    (record,) = listed(cli)
    assert (record["limit"], record["app"], record["burst"]) == ("api", "shop", None)
    assert record["rate"] == {"count": 5, "period_seconds": 10.0}
    assert "rate 5/10s, concurrency 2" in cli("control").out
    answer = limited("limits", "api")
    assert answer.out.splitlines()[1].split() == ["api", "5/10s", "2", "1", "0s", "0", "2"]
    assert "aztask: limit api was changed to rate 5/10s, concurrency 2, by " in answer.err
    assert limited("limits", "five").err == ""
    answer = limited("control", "limit", "api", "--reset")
    assert answer.out.startswith("limit api: the numbers of its declaration apply again; workers")
    assert limited("control", "limit", "api", "--reset").out == "limit api is not changed\n"
    assert listed(cli) == []
    assert limited("limits", "api").out.splitlines()[1].split()[1:3] == ["10/1s", "2"]


def test_the_change_of_a_limit_that_is_no_longer_declared_is_reset(cli, limited, filled):
    limited("control", "limit", "five", "--concurrency", "2")
    cli.module("later_shop", "from aztask import App\napp = App('shop')\n")

    def later(*arguments):
        return cli(*arguments, "-A", "later_shop:app")

    assert "concurrency 2" in later("control", "list").out
    refused = later("control", "limit", "five", "--concurrency", "3")
    assert (refused.code, refused.error) == (5, "the app declares no limit 'five'.")
    answer = later("control", "limit", "five", "--reset")
    assert answer.out.startswith("limit five: the numbers of its declaration apply again")
    assert "concurrency 2" not in later("control", "list").out
    assert later("control", "limit", "five", "--reset").code == 5


@pytest.mark.parametrize(
    ("given", "code", "error"),
    [
        (["ap", "--rate", "5/s"], 5, "the app declares no limit 'ap'. Did you mean 'api'?"),
        (["api"], 2, "give --rate, --burst or --concurrency, or else --reset"),
        (["api", "--reset", "--burst", "1"], 2, "or else --reset"),
        (["api", "--rate", "fast"], 4, "rate takes a text such as"),
        (["five", "--rate", "5/s"], 4, "limit 'five' declares no rate, so none can be changed"),
    ],
)
def test_a_change_of_a_limit_that_cannot_be_is_refused(limited, filled, given, code, error):
    answer = limited("control", "limit", *given)
    assert answer.code == code
    assert error in answer.error


@pytest.mark.parametrize("size", ["0", "-1", "1.5", "many", "10001", "99999999", "\u0663"])
def test_what_is_no_concurrency_is_refused(cli, filled, size):
    answer = cli("control", "scale", "--", size)
    assert answer.code == 2
    assert "is not a concurrency" in answer.error


@pytest.fixture
def keyed(cli):
    cli.module(
        "keyed_shop",
        "from aztask import App\n"
        f"app = App('shop', broker='{cli.address}', results='{cli.address}')\n"
        "app.limit('customer', concurrency=2, key=lambda customer: customer)\n"
        "app.limit('tenant', key=lambda tenant: tenant)\n"
        "app.limit('api', rate='10/s')\n",
    )
    return lambda *words: cli("-A", "keyed_shop:app", "control", *words)


def test_tenants_are_paused_listed_and_resumed(cli, keyed):
    answer = keyed("pause", "--tenant", "customer=acme", "--tenant", "tenant=a=b, c")
    assert answer.out.splitlines() == [
        "tenant customer=acme is paused; workers obey within 5 seconds",
        "tenant tenant=a=b, c is paused; workers obey within 5 seconds",
    ]
    assert keyed("pause", "--tenant", "customer=acme").out == (
        "tenant customer=acme is paused already\n"
    )
    lines = [json.loads(line) for line in keyed("list", "--json").out.splitlines()]
    assert {(each["scope"], each["name"]) for each in lines} == {
        ("tenant", "customer=acme"),
        ("tenant", "tenant=a=b, c"),
    }
    assert keyed("resume", "--tenant", "customer=acme").out == "tenant customer=acme is resumed\n"
    assert keyed("resume", "--all").out == "tenant tenant=a=b, c is resumed\n"


@pytest.mark.parametrize("tenant", ["acme", "=acme", "customer="])
def test_what_is_no_tenant_is_refused(keyed, tenant):
    answer = keyed("pause", "--tenant", tenant)
    assert answer.code == 2
    assert "is not LIMIT=KEY" in answer.error


def test_limits_that_have_no_keys_are_refused(keyed):
    answer = keyed("pause", "--tenant", "customr=acme")
    assert answer.code == 5
    assert "Did you mean 'customer'" in answer.error
    assert keyed("pause", "--tenant", "api=acme").code == 5
    answer = keyed("drain", "--tenant", "tenant=acme")
    assert answer.code == 4
    assert "has no concurrency" in answer.error
    assert keyed("list", "--json").out == "", "nothing was paused"


def test_drain_of_a_tenant_waits_for_its_permits(cli, keyed, quick):
    app = cli.app()
    limit = Limit("customer", None, 2, str)
    clock = StoreClock(app.results.controls, SYSTEM_CLOCK)
    clock.refresh()
    permits = Permits(app.results.controls, clock, "w1", SYSTEM_CLOCK)
    entry = limit.permits_entry("acme")
    assert permits.take(entry, 2, clock.now(), 1)
    answer = keyed("drain", "--tenant", "customer=acme", "--timeout", "1s")
    assert answer.code == 1
    assert "key acme of limit customer on w1 (1)" in answer.error
    permits.release_all()
    answer = keyed("drain", "--tenant", "customer=acme", "--timeout", "5s")
    assert (answer.code, answer.out.splitlines()[-1]) == (0, "no worker runs these tasks")


def test_what_is_unknown_because_the_broker_does_not_say_it_is_accepted(cli, filled, monkeypatch):
    def refuse(self, queue):
        raise ConfigurationError("managing needs the permission to manage")

    monkeypatch.setattr(type(filled.broker), "stats", refuse)
    assert cli("control", "pause", "-Q", "nosuch").out.startswith("queue nosuch is paused; ")
