"""Commands for a Celery application: ``aztask -A proj.celery:app`` with what understands one."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest
from celery import Celery

from aztask.app.loading import find_object
from aztask.operate.celeryapp import CeleryApp
from aztask.operate.celeryschedules import BeatEntry
from aztask.schedules.triggers import Every
from aztask.settlement import DeadLetter

APP = """
from celery import Celery

app = Celery("shop", broker={broker!r}, backend={backend!r})
app.conf.update({settings})


def route(name, args, kwargs, options, task=None, **_):
    if name in ("shop.slow", "shop.own"):
        return {{"queue": name[5:]}}
    if name == "shop.strange":
        return {{"queue": args[0]}}


@app.task(shared=False, name="shop.add", time_limit=600)
def add(left, right):
    return left + right


@app.task(shared=False, name="shop.slow", acks_late=True, reject_on_worker_lost=True)
def slow(): ...


@app.task(shared=False, name="shop.own")
def own(): ...
"""


@pytest.fixture
def shop(cli: Any) -> Any:
    """``shop(settings="...")`` makes the module, and returns a function that runs its commands."""

    def make(settings: str = "", backend: str | None = None, broker: str = "") -> Any:
        backend = f"aztask+{cli.address}" if backend is None else backend
        text = APP.format(
            broker=broker or f"aztask+{cli.address}", backend=backend or None, settings=settings
        )
        cli.module("celery_shop", text)
        return lambda *arguments, **environment: cli(
            "-A", "celery_shop:app", *arguments, **environment
        )

    return make


def findings(ended: Any) -> dict[tuple[str, str], Any]:
    found = [json.loads(line) for line in ended.out.splitlines()]
    return {(each["subject"], each["check"]): each for each in found}


EVERY_PLACE = (
    "task_default_queue='work', "
    "task_queues=None, "
    "task_routes=(route, {'mail.*': 'mail', 'bill.*': {'queue': 'bills'}}, [('pay.*', 'pay')]), "
    "beat_schedule={'n': {'task': 'x', 'schedule': 5, 'options': {'queue': 'nightly'}}}, "
    "broker_transport_options={'lease': 90, 'leases': {'slow': 120}}"
)


def test_queues_are_created_wherever_they_are_named(shop: Any) -> None:
    run = shop(EVERY_PLACE.replace("route, ", "'celery_shop.route', "))
    made = run("queues", "create", "--all")
    assert made.code == 0, made.err
    names = {line.split()[1] for line in made.out.splitlines() if line.startswith("queue")}
    assert names == {"work", "mail", "bills", "pay", "nightly", "slow", "own"}
    listed = [json.loads(line)["queue"] for line in run("queues", "--json").out.splitlines()]
    assert set(listed) == names


def test_queues_with_declarations_and_a_broadcast(shop: Any) -> None:
    run = shop(
        "task_queues=[__import__('kombu').Queue('a'), __import__('kombu').common.Broadcast('all')]"
    )
    made = run("queues", "create", "--all")
    assert "queue a is created" in made.out
    assert "bcast" not in made.out and "all" not in made.out.split()


def test_names_are_translated_as_the_transport_does(shop: Any) -> None:
    run = shop("task_default_queue='A.B', broker_transport_options={'translate_names': True}")
    assert "queue enc-" in run("queues", "create", "--all").out


def test_a_message_is_shown_and_a_dead_letter_replayed(shop: Any, cli: Any) -> None:
    run = shop("task_routes={'shop.add': 'work'}")
    cli.app().send("shop.add", [1, 2], queue="work", task_id="one")
    assert json.loads(run("queues", "peek", "work", "--json").out)["task"] == "shop.add"
    broker = cli.app().broker
    receiver = broker.receiver("work", lease=30.0)
    (delivery,) = receiver.receive(1, 1.0)
    receiver.settle([(delivery, DeadLetter("rejected", "a consumer rejected the message"))])
    receiver.close()
    (letter,) = run("dlq", "list", "--json").out.splitlines()
    assert json.loads(letter)["id"] == "one"
    ended = run("dlq", "replay", "one", "--yes")
    assert ended.code == 0, ended.err
    assert json.loads(run("queues", "peek", "work", "--json").out)["id"] == "one"


# -- results ---------------------------------------------------------------------------------


def stored(cli: Any, task_id: str, result: Any, state: str = "SUCCESS", **more: Any) -> None:
    app = Celery("writer", backend=f"aztask+{cli.address}", set_as_current=False)
    app.backend.store_result(task_id, result, state, **more)


def test_a_result_is_shown(shop: Any, cli: Any) -> None:
    run = shop()
    stored(cli, "good", {"sum": 3})
    stored(cli, "bad", ValueError("no 7"), "FAILURE", traceback="Trace\n  line")
    stored(cli, "now", {"done": 5}, "PROGRESS")
    good = json.loads(run("result", "good", "--json").out)
    assert (good["state"], good["value"]) == ("succeeded", {"sum": 3})
    shown = run("result", "bad").out
    assert "failed" in shown and "ValueError: no 7" in shown and "Trace" in shown
    now = json.loads(run("result", "now", "--json").out)
    assert (now["state"], now["progress"]) == ("started", {"done": 5})
    unknown = run("result", "nosuch")
    assert unknown.code == 5 and "the result backend has no task 'nosuch'" in unknown.error


def test_the_newest_results_are_listed(shop: Any, cli: Any) -> None:
    run = shop()
    for number in range(4):
        stored(cli, f"t{number}", number)
    stored(cli, "bad", ValueError("no"), "FAILURE")
    listed = [json.loads(line) for line in run("result", "--json", "--limit", "3").out.splitlines()]
    assert [each["id"] for each in listed] == ["bad", "t3", "t2"]
    failed = run("result", "--state", "failed", "--json").out.splitlines()
    assert [json.loads(each)["id"] for each in failed] == ["bad"]


def test_a_backend_of_another_kind_is_read_but_not_listed(shop: Any, cli: Any) -> None:
    cli.make_file()
    run = shop(backend="cache+memory://")
    find_object("celery_shop:app").backend.store_result("one", 5, "SUCCESS")
    assert json.loads(run("result", "one", "--json").out)["value"] == 5
    listed = run("result")
    assert listed.code == 4 and "cannot be listed; name a task" in listed.error


def test_without_a_backend(shop: Any, cli: Any) -> None:
    cli.make_file()
    run = shop(backend="")
    ended = run("result", "one")
    assert ended.code == 4 and "sets no result_backend" in ended.error


# -- doctor ----------------------------------------------------------------------------------


def test_doctor_reads_the_application(shop: Any, cli: Any) -> None:
    run = shop(
        "task_serializer='pickle', accept_content=['json', 'pickle'], task_default_queue='work', "
        "broker_transport_options={'visibility_timeout': 3600}"
    )
    run("queues", "create", "--all")
    ended = run("doctor", "--json")
    assert ended.code == 0, ended.out
    found = findings(ended)
    assert "celery_shop" not in found["app", "app"]["text"]
    # Other modules of this process may have shared tasks with every Celery app.
    assert re.search(r"shop, a Celery app: \d+ tasks; queues work", found["app", "app"]["text"])
    assert found["app", "accept-content"]["level"] == "warning"
    assert found["app", "transport-options"]["advice"].startswith("write lease")
    text = found["tasks", "acks-early"]["text"]
    assert re.search(r"\d+ tasks \((\w+, )*shop.add, shop.own\)", text)
    assert ("tasks", "worker-lost") not in found
    assert found["tasks", "time-limits"]["text"].startswith("the longest time limit is 600 s")
    assert found["queue work", "exists"]["level"] == "ok"
    assert found["results", "results"]["level"] == "ok"
    assert not [each for each in found if each[0] == "events" or each[1] == "duplicates"]


@pytest.mark.parametrize(
    ("settings", "check", "level", "code"),
    [
        ("task_serializer='yaml'", "serializer", "problem", 4),
        ("task_default_queue='A?B'", "name", "problem", 4),
        ("task_acks_late=True", "worker-lost", "warning", 0),
        ("task_routes=('celery_shop.route',)", "route", "warning", 0),
    ],
)
def test_doctor_finds(
    shop: Any, cli: Any, settings: str, check: str, level: str, code: int
) -> None:
    run = shop(settings)
    if check == "route":
        with (cli.folder / "celery_shop.py").open("a") as file:
            file.write("\n@app.task(shared=False, name='shop.strange')\ndef strange(name): ...\n")
    run("queues", "create", "--all")
    ended = run("doctor", "--json")
    levels = {each["check"]: each["level"] for each in map(json.loads, ended.out.splitlines())}
    assert levels.get(check) == level, ended.out
    assert ended.code == code


def test_doctor_says_where_results_are(shop: Any) -> None:
    run = shop(backend="cache+memory://")
    run("queues", "create", "--all")
    found = findings(run("doctor", "--json"))
    assert "results are in cache+memory://" in found["results", "backend"]["text"]


def test_a_backend_whose_library_is_missing_is_one_line(shop: Any, cli: Any) -> None:
    cli.make_file()
    run = shop(backend="nosuchmodule.Backend://:SECRET@host/0")
    ended = run("result", "one")
    assert ended.code == 4
    assert "No module named 'nosuchmodule'; install here what its workers" in ended.error
    found = findings(run("doctor", "--json"))
    assert found["results", "backend"]["level"] == "problem"
    assert found["results", "backend"]["advice"].startswith("install here")
    assert "SECRET" not in ended.err


# -- what is refused -------------------------------------------------------------------------


@pytest.mark.parametrize("command", [("worker",), ("tasks",), ("send", "x"), ("workers",)])
def test_other_commands_say_which_ones_work(shop: Any, command: tuple[str, ...]) -> None:
    ended = shop()(*command)
    assert ended.code == 2
    assert "aztask queues, result, dlq, schedule and doctor work with a Celery app" in ended.error


@pytest.mark.parametrize("scheme", ["redis", "nosuch"])
def test_another_broker_is_one_line(shop: Any, scheme: str) -> None:
    """Also where its library is not installed, which Kombu says with an AttributeError."""
    ended = shop(broker=f"{scheme}://:SECRET@host/0")("queues")
    assert ended.code == 4
    assert f"the broker of this Celery app is {scheme}://" in ended.error
    assert "SECRET" not in ended.err


def test_a_module_of_tasks_that_cannot_be_imported_is_one_line(shop: Any) -> None:
    ended = shop("imports=['no_such_tasks']")("queues")
    assert ended.code == 2
    assert "the tasks of this Celery app cannot be imported: ModuleNotFoundError" in ended.error


def test_following_is_for_aztask(shop: Any, cli: Any) -> None:
    cli.make_file()
    assert "those of Celery emit nothing" in shop()("result", "x", "--follow").error


def test_priorities_are_created_and_watched(shop: Any, cli: Any, monkeypatch: Any) -> None:
    run = shop(
        "task_default_queue='work', "
        "broker_transport_options={'priorities': {'high': 4, 'low': 1}, 'order': 'redis'}"
    )
    made = run("queues", "create", "--all").out
    assert [line.split()[1] for line in made.splitlines() if line.startswith("queue")] == [
        "work",
        "work-high",
        "work-low",
    ]
    cli.app().send("shop.add", [1, 2], queue="work-low")
    assert ("queue work-low", "priorities") not in findings(run("doctor", "--json"))
    monkeypatch.setattr("aztask.operate.celeryapp.UNREAD_SECONDS", -1.0)
    found = findings(run("doctor", "--json"))
    assert found["queue work-low", "priorities"]["level"] == "warning"
    assert ("queue work-high", "priorities") not in found


# -- beat's entries --------------------------------------------------------------------------


def test_the_entries_of_beat_are_listed_paused_and_triggered(shop: Any, cli: Any) -> None:
    run = shop("beat_schedule={'n': {'task': 'shop.add', 'schedule': 60, 'args': (1, 2)}}")
    assert run("schedule", "list").code == 0
    app = CeleryApp(find_object("celery_shop:app"))
    app.schedules.put(BeatEntry("every minute", "shop.add", Every(60.0), (1, 2)))
    app.close()
    listed = json.loads(run("schedule", "list", "--json").out)
    assert (listed["name"], listed["task"]) == ("every minute", "shop.add")
    assert run("schedule", "pause", "every minute").code == 0
    assert json.loads(run("schedule", "show", "every minute", "--json").out)["state"] == "paused"
    assert run("schedule", "trigger", "every minute").out.startswith("every minute@")
    assert "1" in run("queues").out


def test_schedules_are_imported_from_a_site_with_django_celery_beat_alone(cli: Any) -> None:
    cli.module("plain_app", "from aztask import App\napp = App('shop', broker='local://')\n")
    ended = cli("-A", "plain_app:app", "migrate", "schedules")
    assert ended.code == 4
    # The second where an earlier test has set Django up.
    assert re.search("set DJANGO_SETTINGS_MODULE|no django_celery_beat", ended.error)
