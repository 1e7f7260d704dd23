import json

import pytest

APP = 'from aztask import App\napp = App("shop", broker="local://", results="local://")\n'


@pytest.fixture
def module(cli):
    return cli.module("main_shop", APP + "@app.task\ndef add(a, b): return a + b\n")


def test_it_is_named_before_the_command_or_after_it(cli, module):
    for arguments in (("-A", module, "tasks"), ("tasks", "--app", f"{module}:app")):
        assert "main_shop" not in cli(*arguments).out
        assert "shop.add" in cli(*arguments).out


def test_the_later_one_counts(cli, module):
    assert cli("-A", "nosuch", "tasks", "-A", module).code == 0
    assert cli("-A", module, "tasks", "-A", "nosuch").code == 2


def test_the_environment_names_it(cli, module):
    assert "shop.add" in cli("tasks", AZTASK_APP=module).out


def test_an_option_may_come_from_the_environment(cli, module):
    ended = cli("tasks", AZTASK_APP=module, AZTASK_TASKS_JSON="1")
    assert json.loads(ended.out)["task"] == "shop.add"


def test_reading_without_it_uses_the_addresses_of_the_environment(cli):
    cli.app().send("shop.add", [1, 2], task_id="a")
    ended = cli("result", "a", AZTASK_BROKER=cli.address, AZTASK_RESULTS=cli.address)
    assert ended.code == 0
    assert "pending" in ended.out
    assert "default" in cli("queues").out


def test_without_any_word_of_where_the_queues_are(cli):
    ended = cli("queues")
    assert ended.code == 4
    assert "there is no queue file .aztask/queues.db here" in ended.error
    assert list(cli.folder.iterdir()) == []


@pytest.mark.parametrize(
    ("text", "spec", "code", "words"),
    [
        ("", "nosuch", 2, "there is no module 'nosuch'"),
        ("", "../x", 2, "does not name an app"),
        ("", "os:system", 2, "not an aztask.App"),
        ("", "a b", 2, "does not name an app"),
        ("", "a\x1b[31m\nb", 2, "does not name an app"),
        ("", "", 2, "does not name an app"),
        ("import sys; sys.exit(3)", "bad_exit", 2, "exits while it is imported"),
        ("def (", "bad_syntax", 2, "SyntaxError"),
        ("import nosuch_at_all", "bad_import", 2, "No module named 'nosuch_at_all'"),
        ("1 / 0", "bad_code", 2, "ZeroDivisionError"),
        ("app = 5", "bad_app", 2, "is a int, not an aztask.App"),
        ("", "bad_empty", 2, "has no 'app'"),
        (
            "from aztask import App; app = App('x', lease=-1)",
            "bad_setting",
            4,
            "lease",
        ),
        (
            "from aztask import App; app = App('x', broker='redis://:SECRETPASS@host')",
            "bad_broker",
            4,
            "no broker of the kind 'redis'",
        ),
        ("raise KeyboardInterrupt", "bad_interrupt", 130, None),
    ],
)
def test_an_app_that_cannot_be_used_is_one_line(cli, text, spec, code, words):
    if spec.startswith("bad_"):
        cli.module(spec, text)
    ended = cli("-A", spec, "worker")
    assert ended.code == code
    if words is not None:
        assert words in ended.error
    assert "SECRETPASS" not in ended.err


SECRET = "U0VDUkVULXNlY3JldC1TRUNSRVQ="


@pytest.mark.parametrize(
    "address",
    [
        "",
        "redis://:SECRETPASS@host",
        "servicebus://",
        "servicebus://name:99999",
        "servicebus://name\r\nx",
        "local://relative",
        "local:///tmp",
        "local:///proc/nosuch/x.db",
        "local:///dev/null/x.db",
        f"Endpoint=sb://ns.servicebus.windows.net/;SharedAccessKey={SECRET}",
        f"Endpoint=sb://n.example/;SharedAccessKeyName=a;SharedAccessKey={SECRET};"
        f"SharedAccessKey={SECRET}",
        f"Endpoint=sb://n.example:99999/;SharedAccessKeyName=a;SharedAccessKey={SECRET}",
        f"Endpoint=sb://n.example/;SharedAccessKeyName=a;SharedAccessKey={SECRET}\r\n",
        "Endpoint=sb://n.example/;SharedAccessKeyName=a;SharedAccessKey=SECRET-not-base64!",
        f"DefaultEndpointsProtocol=https;AccountKey={SECRET};EndpointSuffix=core.windows.net",
        "DefaultEndpointsProtocol=https;AccountName=abc;AccountKey=SECRET!!",
    ],
)
@pytest.mark.parametrize("variable", ["AZTASK_BROKER", "AZTASK_RESULTS"])
def test_a_wrong_address_is_one_line_without_the_secret(cli, address, variable):
    cli.app().broker.declare("default")
    ended = cli("result", "x", **{"AZTASK_RESULTS": cli.address, variable: address})
    assert ended.code in (4, 5)
    assert "SECRET" not in ended.err.upper() or "SHAREDACCESSKEY" in ended.err.upper()
    for secret in (SECRET, "SECRETPASS", "SECRET-not", "SECRET!!"):
        assert secret not in ended.err
    assert ended.error


def test_a_wrong_setting_is_not_called_an_import_error(cli):
    module = cli.module("wrong_setting", "from aztask import App\napp = App('x', lease=-1)\n")
    ended = cli("-A", module, "tasks")
    assert ended.code == 4
    assert "cannot be imported" not in ended.error


def test_a_wrong_setting_in_an_included_module_is_not_called_an_import_error(cli):
    app = "from aztask import App\napp = App('x', broker='local://', include=[{!r}])\n"
    task = "from {} import app\n@app.task(retry=3)\ndef add(a): pass\n"
    tasks = cli.module("wrong_option", task.format("including_app"))
    ended = cli("-A", cli.module("including_app", app.format(tasks)), "tasks")
    assert ended.code == 4
    assert ended.error == (
        "include of app 'x': task 'x.add': retry takes a RetryPolicy, not 3; write "
        f"retry=RetryPolicy(max_retries=3) ({cli.folder}/wrong_option.py, line 2)"
    )


def test_two_tasks_of_one_name_are_not_called_an_import_error(cli):
    text = "from aztask import App\napp = App('x')\n" + 2 * "@app.task\ndef add(a): pass\n"
    ended = cli("-A", cli.module("one_name_twice", text), "tasks")
    assert ended.code == 2
    assert ended.error.startswith("two functions are registered as 'x.add': one_name_twice.add and")


@pytest.mark.parametrize("command", [("worker", "--burst"), ("send", "shop.len", "--args", "[1]")])
def test_an_app_without_a_broker_neither_works_nor_sends(cli, command):
    module = cli.module("no_broker", "from aztask import App\napp = App('shop')\napp.task(len)\n")
    ended = cli(*command, "-A", module)
    assert ended.code == 4
    assert ended.err.splitlines()[-1].startswith("aztask: error: no broker is named: set AZTASK_B")
    assert not (cli.folder / ".aztask").exists()


def test_sending_without_an_app_and_a_broker_creates_no_file(cli):
    ended = cli("send", "shop.add")
    assert ended.code == 4
    assert "AZTASK_BROKER" in ended.error
    assert not (cli.folder / ".aztask").exists()


def test_the_queue_file_of_the_directory_is_read_without_being_named(cli):
    cli.app().send("shop.add", [1, 2], task_id="a")
    assert "default" in cli("queues").out
