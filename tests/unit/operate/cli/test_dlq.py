import json

import pytest

from aztask.message.envelope import Envelope
from aztask.settlement import DeadLetter


@pytest.fixture
def app(cli, monkeypatch):
    """Two queues with dead letters: a and b of "default", c and one that is no task of "slow"."""
    monkeypatch.setenv("AZTASK_BROKER", cli.address)
    monkeypatch.setenv("AZTASK_RESULTS", cli.address)
    app = cli.app()
    app.send("shop.add", [1], {"b": "\x1b[31m"}, task_id="a")
    bury(app, "default", "retries-exhausted")
    app.send("shop.mul", [1], task_id="b")
    bury(app, "default", "rejected")
    app.send("shop.add", [1], task_id="c", queue="slow")
    bury(app, "slow", "retries-exhausted")
    app.broker.send("slow", [Envelope(b"\xff" * 300, {"x": "\n"}, message_id="odd")])
    bury(app, "slow", "undecodable")
    return app


def bury(app, queue, reason):
    receiver = app.broker.receiver(queue, lease=30.0)
    (delivery,) = receiver.receive(1, 1.0)
    receiver.settle([(delivery, DeadLetter(reason, "it\nbroke"))])


def lines(ended):
    assert ended.code == 0, ended.err
    return [json.loads(line) for line in ended.out.splitlines()]


def ids(cli, *options):
    return [each["id"] for each in lines(cli("dlq", "list", "--json", *options))]


def test_list(cli, app):
    assert ids(cli) == ["a", "b", "c", "odd"]
    assert ids(cli, "-Q", "slow") == ["c", "odd"]
    assert ids(cli, "-Q", "slow,default", "-Q", "default") == ["c", "odd", "a", "b"]
    assert ids(cli, "--task", "shop.add") == ["a", "c"]
    assert ids(cli, "--reason", "rejected") == ["b"]
    assert ids(cli, "--signature", "it broke", "--task", "shop.mul") == ["b"]
    assert ids(cli, "--signature", "it broke otherwise") == []
    assert ids(cli, "--limit", "1") == ["a"]


def test_list_as_a_table(cli, app):
    table = cli("dlq", "list").out.splitlines()
    assert len(table) == 5
    assert "it\\nbroke" in table[1]


def test_groups(cli, app):
    groups = lines(cli("dlq", "groups", "--json"))
    keys = ("queue", "task", "reason", "signature", "count")
    assert [tuple(g[key] for key in keys) for g in groups] == [
        ("default", "shop.add", "retries-exhausted", "it broke", 1),
        ("default", "shop.mul", "rejected", "it broke", 1),
        ("slow", "shop.add", "retries-exhausted", "it broke", 1),
        ("slow", None, "undecodable", "it broke", 1),
    ]
    assert len(cli("dlq", "groups").out.splitlines()) == 5


def test_show(cli, app):
    assert "args:        (hidden; --values shows it)" in cli("dlq", "show", "a").out
    out = cli("dlq", "show", "a", "--values").out
    assert "args:        [1]" in out
    assert '{"b": "\\u001b[31m"}' in out
    assert "\x1b" not in out
    (shown,) = lines(cli("dlq", "show", "a", "--values", "--json"))
    assert (shown["args"], shown["kwargs"]) == ([1], {"b": "\x1b[31m"})
    assert shown["headers"]["task"] == "shop.add"


def test_show_what_cannot_be_decoded(cli, app):
    out = cli("dlq", "show", "odd", "--values").out
    assert "no task header" in out
    assert "and 44 more bytes" in out
    (shown,) = lines(cli("dlq", "show", "odd", "--values", "--json"))
    assert shown["args"] is None


@pytest.mark.parametrize("command", [["show"], ["replay", "--yes"], ["purge", "--yes"]])
@pytest.mark.parametrize("name", ["nosuch", "\x1b[31m", "@999", "x" * 3000])
def test_an_unknown_id(cli, app, command, name):
    ended = cli("dlq", *command, name)
    assert ended.code == 5
    assert ended.error


def test_replay_one(cli, app):
    assert cli("dlq", "replay", "a", "--yes").out == "replayed 1 dead letter\n"
    assert ids(cli) == ["b", "c", "odd"]
    assert app.broker.stats("default").active == 1


def test_replay_by_what_list_shows(cli, app):
    position = lines(cli("dlq", "list", "--json"))[3]["position"]
    assert cli("dlq", "replay", f"@{position}", "-Q", "slow", "--yes").code == 0
    assert cli("dlq", "replay", "c:0:0", "--yes").code == 0
    assert ids(cli) == ["a", "b"]


def test_replay_of_all_queues(cli, app):
    assert cli("dlq", "replay", "--all", "--yes", "--rate", "1000").out == (
        "replayed 4 dead letters\n"
    )
    assert ids(cli) == []
    assert cli("dlq", "replay", "--all", "--yes").out == "there is nothing to replay\n"


def test_purge_by_task(cli, app):
    assert cli("dlq", "purge", "--task", "shop.add", "--yes").out == "purged 2 dead letters\n"
    assert ids(cli) == ["b", "odd"]
    assert cli("dlq", "purge", "--all", "-Q", "slow", "--yes").out == "purged 1 dead letter\n"
    assert ids(cli) == ["b"]


@pytest.mark.parametrize("verb", ["replay", "purge"])
def test_the_impact_is_said_before_anything_is_done(cli, app, verb):
    ended = cli("dlq", verb, "--task", "shop.add", "--dry-run")
    assert (ended.code, ended.out) == (
        0,
        f"would {verb} 2 dead letters (1 of default, 1 of slow)\n",
    )
    ended = cli("dlq", verb, "--all")  # stdin is no terminal
    assert ended.code == 2
    assert f"this would {verb} 4 dead letters (2 of default, 2 of slow); add --yes" in ended.error
    assert ids(cli) == ["a", "b", "c", "odd"]


@pytest.mark.parametrize("verb", ["replay", "purge"])
@pytest.mark.parametrize(
    ("given", "words"),
    [
        ([], "select dead letters"),
        (["a", "--all"], "--all cannot be combined"),
        (["--all", "--task", "x"], "--all cannot be combined"),
    ],
)
def test_a_selection_is_needed(cli, app, verb, given, words):
    ended = cli("dlq", verb, *given, "--yes")
    assert ended.code == 2
    assert words in ended.error


@pytest.mark.parametrize("rate", ["0", "-1", "nan", "inf", "x"])
def test_a_rate_must_be_one(cli, app, rate):
    ended = cli("dlq", "replay", "--all", "--yes", "--rate", rate)
    assert ended.code == 2
    assert len(ids(cli)) == 4


def test_what_somebody_else_holds_is_told(cli, app):
    receiver = app.broker.receiver("default", lease=30.0, dead_letter=True)
    assert len(receiver.receive(1, 1.0)) == 1
    ended = cli("dlq", "replay", "--all", "--yes")
    assert ended.code == 1
    assert ended.out == "replayed 3 dead letters\n"
    assert "1 dead letter could not be received" in ended.error
