import json

import pytest

from aztask.settlement import Complete, DeadLetter

BAD_NAMES = ["../x", "x" * 64, "Upper", "a\nb", "\x1b[31mred", "a b", "ü", "-a", "\udcff"]


@pytest.fixture
def broker(cli, monkeypatch):
    monkeypatch.setenv("AZTASK_BROKER", cli.address)
    return cli.app().broker


def test_created_listed_deleted(cli, broker):
    assert (
        cli("queues", "create", "one", "two").out == "queue one is created\nqueue two is created\n"
    )
    again = cli("queues", "create", "two", "three").out
    assert again == "queue two exists already\nqueue three is created\n"
    assert cli("queues", "delete", "three", "--yes").code == 0
    cli.app().send("t", queue="one")
    lines = cli("queues").out.splitlines()
    assert lines[0].split() == [
        "QUEUE",
        "TOTAL",
        "ACTIVE",
        "LEASED",
        "SCHEDULED",
        "DEFERRED",
        "DEAD",
    ]
    assert [line.split() for line in lines[1:]] == [
        ["one", "1", "1", "0", "0", "0", "0"],
        ["two", "0", "0", "0", "0", "0", "0"],
    ]
    assert cli("queues", "delete", "one", "--yes").out == "queue one is deleted\n"
    assert broker.queues() == ["two"]


def test_json(cli, broker):
    broker.declare("one")
    for arguments in (("queues", "--json"), ("queues", "list", "--json")):
        (line,) = cli(*arguments).out.splitlines()
        assert json.loads(line)["queue"] == "one"
        assert json.loads(line)["total"] == 0, "as in the table"
    assert cli("queues", "--json", "create", "x").code == 2


def test_options_of_create_are_applied(cli, broker):
    created = cli(
        *("queues", "create", "one", "--lease", "90s", "--duplicate-window", "5m"),
        *("--time-to-live", "1h", "--max-deliveries", "7", "--sessions"),
    )
    assert created.code == 0
    made = broker.engine.queue("one")
    assert (made.lease_seconds, made.duplicate_window, made.max_deliveries) == (90.0, 300.0, 7)
    assert (made.time_to_live, made.sessions) == (3600.0, True)


def test_the_queues_of_its_priorities_are_created_with_a_queue(cli, broker):
    cli.module(
        "priority_shop",
        "from aztask import App\napp = App('shop', broker='local://')\n"
        "app.queue('orders', lease=90, priorities={'high': 4, 'low': 1})\n",
    )
    created = cli("-A", "priority_shop:app", "queues", "create", "orders", "mail")
    names = ["orders", "orders-high", "orders-low", "mail"]
    assert created.out.splitlines() == [f"queue {name} is created" for name in names]
    assert broker.engine.queue("orders-low").lease_seconds == 90.0
    sent = cli("-A", "priority_shop:app", "send", "t", "--queue", "orders", "--priority", "high")
    assert sent.code != 0, "the app has no task of this name"
    sent = cli("-A", "priority_shop:app", "send", "t", "--priority", "")
    assert "--priority is empty" in sent.error


def test_all_queues_of_an_app_are_created(cli, broker):
    cli.module(
        "whole_shop",
        "from aztask import App\napp = App('shop', broker='local://')\n"
        "app.queue('orders', priorities={'high': 4, 'normal': 1})\n"
        "@app.task(queue='mail')\ndef welcome(): ...\n"
        "@app.task\ndef resize(): ...\n",
    )
    made = cli("-A", "whole_shop", "queues", "create", "--all").out.splitlines()
    names = ["default", "mail", "orders", "orders-high"]
    assert made == [f"queue {name} is created" for name in names]
    assert broker.queues() == ["default", "mail", "orders", "orders-high"]


def test_the_app_says_how_its_queues_are_made(cli, broker):
    cli.module(
        "queues_shop",
        "from aztask import App\napp = App('shop', broker='local://')\n"
        "app.queue('slow', duplicate_window=120.0)\n",
    )
    assert cli("-A", "queues_shop", "queues", "create", "slow").code == 0
    assert broker.engine.queue("slow").duplicate_window == 120.0


def test_deleting_says_what_would_be_lost(cli, broker):
    cli.app().send("t", queue="one")
    ended = cli("queues", "delete", "one", "--dry-run")
    assert (ended.code, ended.out) == (0, "would delete queue one with 1 message\n")
    ended = cli("queues", "delete", "one")  # stdin is no terminal
    assert ended.code == 2
    assert "add --yes" in ended.error
    assert broker.queues() == ["one"]


@pytest.mark.parametrize("name", BAD_NAMES)
def test_a_name_that_is_not_allowed(cli, broker, name):
    ended = cli("queues", "create", name)
    assert ended.code in (2, 4)
    assert ended.error
    assert broker.queues() == []


@pytest.mark.parametrize("name", ["", *BAD_NAMES, "nosuch"])
def test_a_queue_that_is_not_there(cli, broker, name):
    for arguments in (("queues", "delete", name, "--yes"), ("dlq", "list", "-Q", name)):
        ended = cli(*arguments)
        assert ended.code in (2, 4, 5)
        assert ended.error


@pytest.mark.parametrize(
    "option",
    [["--lease", "0"], ["--lease", "8d"], ["--max-deliveries", "0"], ["--time-to-live", "nan"]],
)
def test_options_out_of_range(cli, broker, option):
    assert cli("queues", "create", "one", *option).code == 2
    assert broker.queues() == []


def test_the_numbers_of_the_table_and_of_json_agree(cli, broker):
    broker.declare("orders")
    app = cli.app()
    app.send("shop.add", [1], queue="orders")
    app.send("shop.add", [2], queue="orders")
    app.send("shop.add", [3], queue="orders", delay=3600)
    receiver = broker.receiver("orders", lease=60.0, prefetch=0)
    first, second = receiver.receive(2, 5.0)
    receiver.settle([(first, DeadLetter("no-such-customer"))])
    table = cli("queues").out.splitlines()
    names, values = table[0].lower().split(), table[1].split()
    record = json.loads(cli("queues", "--json").out)
    assert {name: str(record[name]) for name in names} == dict(zip(names, values, strict=True))
    assert (record["total"], record["leased"], record["scheduled"], record["dead"]) == (2, 1, 1, 1)
    receiver.settle([(second, Complete())])
    receiver.close()
