"""``aztask schedule``: schedules as a list and one by one, paused, triggered and filled in."""

import json
from datetime import UTC, datetime

import pytest

from aztask import App
from aztask.schedules.stored import read_schedule


@pytest.fixture
def module(cli, monkeypatch):
    """The module that the commands load, in which no worker has run yet."""
    monkeypatch.setenv("AZTASK_BROKER", cli.address)
    monkeypatch.setenv("AZTASK_RESULTS", cli.address)
    monkeypatch.setenv("AZTASK_APP", "shopapp:app")
    cli.module(
        "shopapp",
        "from aztask import App\n"
        "app = App('shop')\n"
        "@app.task\n"
        "def report(region):\n    return region\n"
        "app.schedule('nightly', report.s('eu'), cron='0 2 * * *', tz='Europe/Berlin')\n",
    )
    cli.app().broker.declare("default")


@pytest.fixture
def shop(cli, module):
    app = cli.app()

    @app.task
    def report(region):
        return region

    app.schedule("nightly", report.s("eu"), cron="0 2 * * *", tz="Europe/Berlin")
    runner = app.schedules.runner("worker")
    runner.turn()
    runner._look_at = 0.0
    runner.turn()
    return app


def test_a_schedule_that_no_worker_has_started(cli, module):
    line = cli("schedule", "list").out.splitlines()[1]
    assert line.startswith("shop.nightly  new    0 2 * * * Europe/Berlin  20")
    assert line.endswith("Z  shop.report")
    assert len(json.loads(cli("schedule", "list", "--json").out)["next"]) == 5
    ended = cli("schedule", "trigger", "nightly")
    assert ended.code == 5
    assert "is new: run aztask worker or aztask scheduler, which start it, and try" in ended.error
    assert "to run its task now, use aztask send" in ended.error


def test_the_list_has_the_next_time_in_local_time_and_utc(cli, shop):
    head, line = cli("schedule", "list").out.splitlines()
    assert " ".join(head.split()) == "NAME STATE WHEN NEXT, LOCAL NEXT, UTC TASK"
    assert line.startswith("shop.nightly  active  0 2 * * * Europe/Berlin  20")
    (found,) = [json.loads(line) for line in cli("schedule", "list", "--json").out.splitlines()]
    assert (found["name"], found["task"], found["origin"]) == (
        "shop.nightly",
        "shop.report",
        "code",
    )
    assert len(found["next"]) == 5
    first = found["next"][0]
    utc, local = (datetime.fromisoformat(first[name]) for name in ("utc", "local"))
    assert utc == local > datetime.now(UTC)
    assert (local.hour, utc.tzinfo) == (2, UTC)


def test_show_has_rules_times_and_occurrences(cli, shop):
    task_id = cli("schedule", "trigger", "nightly").out.strip()
    shown = cli("schedule", "show", "nightly").out
    assert "missed:       latest" in shown
    assert shown.count("next:") == 5
    assert task_id in shown
    found = json.loads(cli("schedule", "show", "shop.nightly", "--json").out)
    (occurrence,) = found["occurrences"]
    assert (occurrence["task_id"], occurrence["state"]) == (task_id, "sent")
    assert occurrence["kind"] == "trigger"
    assert shop.broker.stats("default").active == 1


def test_pause_and_resume(cli, shop):
    assert cli("schedule", "pause", "nightly").out == "nightly is paused\n"
    found = json.loads(cli("schedule", "show", "nightly", "--json").out)
    assert (found["state"], found["next"]) == ("paused", [])
    assert cli("schedule", "resume", "nightly").code == 0
    assert json.loads(cli("schedule", "show", "nightly", "--json").out)["state"] == "active"


def test_backfill_takes_the_schedules_own_zone(cli, shop):
    command = (
        "schedule",
        "backfill",
        "nightly",
        "--from",
        "2026-01-01",
        "--to",
        "2026-01-02T03:00",
    )
    ended = cli(*command)
    assert ended.out.splitlines() == [
        "shop.nightly@2026-01-01T01:00:00Z",
        "shop.nightly@2026-01-02T01:00:00Z",
    ]
    assert cli(*command).out == ""
    message = shop.broker.peek("default", limit=1)[0].envelope
    assert message.headers["aztask-scheduled-at"] == 1767229200.0
    wrong = cli("schedule", "backfill", "nightly", "--from", "2026-01-02", "--to", "2026-01-01")
    assert (wrong.code, "--from is after --to" in wrong.err) == (2, True)
    wrong = cli("schedule", "backfill", "nightly", "--from", "yesterday", "--to", "2026-01-01")
    assert wrong.code == 2
    assert "'yesterday' is not a time; write 2026-11-01T02:00:00Z" in wrong.err


@pytest.mark.parametrize(
    "command", [["show"], ["pause"], ["resume"], ["trigger"], ["backfill", "--from", "2026-01-01"]]
)
def test_an_unknown_schedule(cli, shop, command):
    more = ["--to", "2026-01-02"] if command[0] == "backfill" else []
    ended = cli("schedule", *command, *more, "unknown")
    assert ended.code == 5
    assert ended.error == ("no schedule has the name shop.unknown; aztask schedule list shows all")


def test_without_an_app_the_full_name_is_enough(cli, shop, monkeypatch):
    monkeypatch.delenv("AZTASK_APP")
    assert cli("schedule", "pause", "shop.nightly").code == 0
    assert json.loads(cli("schedule", "show", "shop.nightly", "--json").out)["state"] == "paused"
    assert cli("schedule", "trigger", "shop.nightly").out.startswith("shop.nightly@")
    assert cli("schedule", "show", "nightly").code == 5


def test_without_results_one_line_says_so(cli, monkeypatch):
    monkeypatch.setenv("AZTASK_BROKER", cli.address)
    cli.app().broker.declare("default")
    ended = cli("schedule", "list")
    assert ended.code == 4
    assert "no result store is configured" in ended.error


def test_a_damaged_schedule_is_listed(cli, shop):
    store = shop.schedules.engine.store
    store.commit("shop.damaged", b"\xc1", None)
    assert "unreadable" in cli("schedule", "list").out
    ended = cli("schedule", "show", "damaged")
    assert ended.code == 1
    assert "schedule damaged cannot be read" in ended.error
    assert read_schedule(store.read("shop.nightly").head.data).paused_at is None


@pytest.fixture
def staging(cli, shop, tmp_path):
    """Another app of that name on the same store, with a broker and a schedule of its own."""
    app = App("shop", broker=f"local://{tmp_path}/staging.db", results=cli.address)

    @app.task
    def report(region):
        return region

    app.schedules.create("nightly", report.s("us"), every=60)
    yield app
    app.close()


def test_the_schedules_of_others_are_listed_with_their_owner(cli, staging):
    head, mine, theirs = cli("schedule", "list").out.splitlines()
    assert head.split()[-1] == "OWNER"
    assert mine.endswith("Z  shop.report")
    assert theirs.startswith("shop.nightly  active  every 60 s ")
    assert theirs.endswith(f"  {staging.owner}")
    found = [json.loads(line) for line in cli("schedule", "list", "--json").out.splitlines()]
    assert [each["owner"] for each in found] == [None, str(staging.owner)]
    assert json.loads(cli("schedule", "show", "nightly", "--json").out)["when"].startswith("0 2 ")
    assert cli("schedule", "pause", "nightly").code == 0
    assert staging.schedules.view("nightly").schedule.paused_at is None


def test_without_an_app_a_name_of_the_same_broker_is_meant(cli, staging, monkeypatch):
    monkeypatch.delenv("AZTASK_APP")
    assert cli("schedule", "pause", "shop.nightly").code == 0
    assert staging.schedules.view("nightly").schedule.paused_at is None


def test_two_apps_of_one_broker_have_a_schedule_of_one_name(cli, shop, monkeypatch):
    for name in ("first", "second"):
        app = App(name, broker=cli.address, results=cli.address)
        app.task(name=f"{name}.work")(len)
        app.schedules.create("shared.poll", app.tasks[f"{name}.work"].s("ab"), every=60)
        app.close()
    monkeypatch.delenv("AZTASK_APP")
    ended = cli("schedule", "trigger", "shared.poll")
    assert ended.code == 2
    assert "shared.poll is a schedule of first on local://" in ended.err
    assert ", second on local://" in ended.err


def test_one_time_that_has_passed_is_listed_as_missed_before_and_after_a_worker(cli, module):
    cli.module(
        "pastapp",
        "from datetime import UTC, datetime\n"
        "from aztask import App\n"
        "app = App('shop')\n"
        "@app.task\n"
        "def report(region='eu'):\n    return region\n"
        "app.schedule('once', report.s(), at=datetime(2026, 1, 2, tzinfo=UTC))\n",
    )
    (found,) = map(
        json.loads, cli("schedule", "list", "-A", "pastapp:app", "--json").out.split("\n")[:1]
    )
    assert (found["name"], found["state"], found["next"]) == ("shop.once", "missed", [])
    app = cli.app()

    @app.task
    def report(region="eu"):
        return region

    app.schedule("once", report.s(), at=datetime(2026, 1, 2, tzinfo=UTC))
    runner = app.schedules.runner("worker")
    runner.turn()
    runner._look_at = 0.0
    runner.turn()
    assert " missed " in cli("schedule", "list", "-A", "pastapp:app").out
    assert "state:        missed" in cli("schedule", "show", "once", "-A", "pastapp:app").out
