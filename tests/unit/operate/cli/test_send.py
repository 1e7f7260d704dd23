import json

import pytest

from aztask import App
from aztask.errors import ContentRefused
from aztask.settlement import Complete
from aztask.stores.records.base import Finish, Outcome, RunKey, Start, State

WAIT = ("--wait", "--timeout", "10s")

SHOP = """
from aztask import App
app = App("shop", broker="local://", results="local://")

@app.task(queue="sums")
def add(a: int, b: int) -> int:
    return a + b
"""


@pytest.fixture
def shop(cli):
    return cli.module("send_shop", SHOP)


def sent(cli, queue="sums"):
    app = cli.app()
    return [app.codec.from_envelope(p.envelope, queue) for p in app.broker.peek(queue)]


def arguments(cli, message):
    return cli.app().codec.decode_arguments(message)


def test_the_id_is_printed_and_the_message_sent(cli, shop):
    ended = cli("send", "-A", shop, "shop.add", "--args", "[1]", "--kwargs", '{"b": 2}')
    assert (ended.code, ended.err) == (0, "")
    (message,) = sent(cli)
    assert ended.out == f"{message.id}\n"
    assert arguments(cli, message) == ((1,), {"b": 2})


def test_every_option_has_its_effect(cli, shop):
    ended = cli(
        *("send", "-A", shop, "shop.add", "--args", "[1, 2]", "--delay", "1h", "-q", "other"),
        *("--task-id", "mine", "--expires", "2h"),
    )
    assert ended.out == "mine\n"
    app = cli.app()
    (peeked,) = app.broker.peek("other")
    message = app.codec.from_envelope(peeked.envelope, "other")
    assert peeked.due - peeked.enqueued_at == pytest.approx(3600, abs=5)
    assert message.expires - peeked.enqueued_at == pytest.approx(7200, abs=5)


def test_a_known_id_is_sent_once_unless_forced(cli, shop):
    send = ("send", "-A", shop, "shop.add", "--args", "[1, 2]", "--task-id", "mine")
    assert cli(*send).out == cli(*send).out == "mine\n"
    assert [message.key for message in sent(cli)] == [("mine", 0, 0)]
    cli(*send, "--force")
    assert [message.generation for message in sent(cli)] == [0, 1]


def test_without_an_app_any_name_goes(cli):
    given = ("send", "other.task", "--args", "[1]", "-q", "sums")
    assert cli(*given, AZTASK_BROKER=cli.address).code == 0
    assert [message.task for message in sent(cli)] == ["other.task"]


def test_waiting_prints_the_value(cli, shop):
    app = cli.app()
    app.send("shop.add", [1, 2], task_id="done")
    end(app, "done", value=app.codec.encode_value({"sum": 3}))
    ended = cli("send", "-A", shop, "shop.add", "--args", "[1, 2]", "--task-id", "done", *WAIT)
    assert (ended.code, json.loads(ended.out)) == (0, {"sum": 3})


TYPED = """
from dataclasses import dataclass
from pathlib import Path
from aztask import App
app = App("shop", broker="local://", results="local://", strict=True)

@dataclass
class Order:
    id: int
    folder: Path

@app.task(queue="sums")
def bill(order: Order) -> Order:
    return order
"""


def test_typed_arguments_are_json_and_a_typed_value_is_printed_as_json(cli):
    spec = cli.module("typed_shop", TYPED)
    order = {"id": 1, "folder": "a/b"}
    given = ("send", "-A", spec, "shop.bill", "--args", json.dumps([order]), "--task-id", "done")
    assert cli(*given).code == 0
    (message,) = sent(cli)
    assert arguments(cli, message) == ((order,), {})
    app = cli.app()
    end(app, "done", task="shop.bill", value=app.codec.encode_value(order))
    assert json.loads(cli(*given, *WAIT).out) == order


def test_a_strict_task_refuses_wrong_json_with_the_field(cli):
    spec = cli.module("typed_shop", TYPED)
    ended = cli("send", "-A", spec, "shop.bill", "--args", '[{"id": "x", "folder": "a"}]')
    assert ended.code != 0
    assert "task shop.bill: order.id is a str, not int" in ended.err
    assert ended.out == "", "nothing was sent"


def test_waiting_for_a_task_that_failed(cli, shop):
    app = cli.app()
    app.send("shop.add", [1, 2], task_id="bad")
    end(app, "bad", state="failed", error_type="ValueError", error="no\x1b[31m\nsum")
    ended = cli("send", "-A", shop, "shop.add", "--args", "[1, 2]", "--task-id", "bad", *WAIT)
    assert (ended.code, ended.out) == (1, "")
    assert ended.err == "bad\naztask: error: task bad failed: ValueError: no\\x1b[31m sum\n"


def test_waiting_ends_in_time(cli, shop):
    ended = cli(
        *("send", "-A", shop, "shop.add", "--args", "[1, 2]", "--task-id", "x", *WAIT),
        *("--timeout", "10ms"),
    )
    assert ended.code == 1
    assert "aztask: error: task x did not end within 0.01 s" in ended.err


def test_waiting_without_a_result_store_sends_nothing(cli):
    ended = cli("send", "shop.add", "-q", "sums", "--wait", AZTASK_BROKER=cli.address)
    assert ended.code == 4
    assert "no result store" in ended.error
    assert cli.app().broker.queues() == []


@pytest.mark.parametrize(
    ("given", "code", "words"),
    [
        (["shop.ad"], 5, "the app has no task 'shop.ad'. Did you mean 'shop.add'?"),
        (["shop.add"], 2, "missing a required argument"),
        (["shop.add", "--args", "[1, 2, 3]"], 2, "too many positional"),
        (["shop.add", "--kwargs", '{"self": 1}'], 2, "argument"),
        (["shop.add", "--args", "nope"], 2, "is not valid JSON"),
        (["shop.add", "--args", '"text"'], 2, "is not a JSON list"),
        (["shop.add", "--kwargs", "[]"], 2, "is not a JSON object"),
        (["shop.add", "--args", "[NaN, 1]"], 2, "NaN is not JSON"),
        (["shop.add", "--args", '["\\ud800", 1]'], 2, "surrogates"),
        (["shop.add", "--args", "[1, 2]", "--delay", "-1"], 2, "is not a duration"),
        (["shop.add", "--args", "[1, 2]", "--delay", "nan"], 2, "is not a duration"),
        (["shop.add", "--args", "[1, 2]", "--delay", "99999d"], 2, "is not between"),
        (["shop.add", "--args", "[1, 2]", "--expires", "0"], 2, "is not between"),
        (["shop.add", "--args", "[1, 2]", "--timeout", "1s"], 2, "--timeout needs --wait"),
        (["shop.add", "--args", "[1, 2]", "--task-id", ""], 2, "--task-id is empty"),
        (["shop.add", "--args", "[1, 2]", "-q", ""], 2, "queue is empty"),
        (["shop.add", "--args", "[1, 2]", "--task-id", "a\nb"], 2, "cannot be printed"),
        (["shop.add", "--args", "[1, 2]", "--task-id", "x" * 2000], 2, "1 to 1024"),
        ([""], 2, "TASK is empty"),
        (["shop.add", "--args", "[1, 2]", "-q", "../x"], 4, "cannot name a queue"),
        (["shop.add", "--args", "[1, 2]", "-q", "x" * 64], 4, "cannot name a queue"),
        (["shop.add", "--args", "[1, 2]", "-q", "Upper"], 4, "cannot name a queue"),
        (["shop.add", "--args", "[1, 2]", "-q", "a\nb"], 4, "cannot name a queue"),
        (["shop.add", "--args", "[1, 2]", "-q", "\x1b[31m"], 4, "cannot name a queue"),
    ],
    ids=range(24),
)
def test_bad_input_is_one_line(cli, shop, given, code, words):
    ended = cli("send", "-A", shop, *given)
    assert ended.code == code
    assert words in ended.error
    assert ended.out == ""


def end(app, task_id, *, task="shop.add", state="succeeded", **outcome):
    """Record how a run ended, as a worker does."""
    key = RunKey(task_id)
    app.results.start([Start(key, task, "sums", 1, "me", "w", 1e9)])
    done = Outcome(State(state), Complete(), at=1e9 + 1, duration=0.5, **outcome)
    assert app.results.record([Finish(key, "me", done)]) == [True]


def test_it_signs_without_an_app_with_keys_from_the_environment(cli, tmp_path):
    key = "k" * 32
    file = tmp_path / "key"
    file.write_text(key + "\n")
    variables = {"AZTASK_SIGNING_KEYS_FILE": str(file), "AZTASK_ID_KEY": "i" * 32}
    ended = cli("send", "shop.add", "-q", "sums", AZTASK_BROKER=cli.address, **variables)
    assert (ended.code, ended.err) == (0, "")
    app = App("shop", broker=cli.address, signing_keys=[key], old_signatures=False)
    (peeked,) = app.broker.peek("sums")
    assert app.codec.from_envelope(peeked.envelope, "sums").task == "shop.add"
    assert peeked.envelope.message_id.startswith("keyed-")
    other = App("shop", broker=cli.address, signing_keys=["x" * 32])
    with pytest.raises(ContentRefused):
        other.codec.from_envelope(peeked.envelope, "sums")


def test_it_signs_for_the_environment_that_the_variable_names(cli):
    key = "k" * 32
    variables = {"AZTASK_SIGNING_KEYS": key, "AZTASK_ENVIRONMENT": "staging"}
    ended = cli("send", "shop.add", "-q", "sums", AZTASK_BROKER=cli.address, **variables)
    assert (ended.code, ended.err) == (0, "")
    staging, production = (
        App("shop", broker=cli.address, signing_keys=[key], environment=name)
        for name in ("staging", "production")
    )
    (peeked,) = staging.broker.peek("sums")
    assert staging.codec.from_envelope(peeked.envelope, "sums").task == "shop.add"
    with pytest.raises(ContentRefused):
        production.codec.from_envelope(peeked.envelope, "sums")
