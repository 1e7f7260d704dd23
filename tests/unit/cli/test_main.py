import json
import subprocess
import sys
from importlib import import_module

import click
import pytest

from aztask.cli.main import COMMANDS
from aztask.cli.main import cli as group
from aztask.cli.spark import COMMANDS as SPARK_COMMANDS
from aztask.version import __version__

APP = 'from aztask import App\napp = App("shop", broker="local://", results="local://")\n'


def commands(command=group, path=()):
    """Every command with its path."""
    yield path, command
    if isinstance(command, click.Group):
        ctx = click.Context(command)
        for name in command.list_commands(ctx):
            yield from commands(command.get_command(ctx, name), (*path, name))


PATHS = [path for path, _ in commands()]


def test_help_says_of_each_command_what_the_command_says(cli):
    ended = cli("--help")
    assert ended.code == 0
    for name, about in COMMANDS.items():
        command = import_module(f"aztask.cli.{name}").command
        assert command.name == name
        assert command.get_short_help_str(limit=100) == about
        assert f"  {name}" in ended.out


def test_help_of_the_pipeline_says_what_its_commands_say(cli):
    out = cli("spark", "--help").out
    for name, about in SPARK_COMMANDS.items():
        command = import_module(f"aztask.cli.spark.{name}").command
        assert command.name == name
        assert command.get_short_help_str(limit=100) == about
        assert f"  {name}" in out


@pytest.mark.parametrize("path", PATHS, ids=" ".join)
def test_every_command_has_help(cli, path):
    for option in ("--help", "-h"):
        ended = cli(*path, option)
        assert ended.code == 0
        assert ended.out.startswith("Usage: aztask")


def test_every_option_has_help_and_every_reading_command_has_json():
    for path, command in commands():
        for param in command.params:
            if isinstance(param, click.Option):
                assert param.help, (path, param.name)
        reads = path[-1:] in [("list",), ("groups",), ("show",), ("result",), ("tasks",)]
        if reads or path in [("queues",), ("workers",), ("demo",)]:
            assert any(param.name == "json" for param in command.params), path


def test_version(cli):
    assert cli("--version").out == f"aztask {__version__}\n"
    assert cli("tasks", "--help", AZTASK_VERSION="1").out.startswith("Usage:")


def test_help_imports_neither_kombu_nor_an_sdk():
    code = (
        "import sys\nfrom aztask.cli import main\nassert main.run(['--help']) == 0\n"
        "heavy = ('kombu', 'azure', 'msgpack', 'sqlite3', 'aztask.app')\n"
        "print([name for name in heavy if name in sys.modules], file=sys.stderr)"
    )
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert ended.stderr == "[]\n"


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["wroker"], "there is no command 'wroker'. Did you mean 'worker'?"),
        (["nothing-like-it"], "there is no command 'nothing-like-it'; see aztask --help"),
        (["dlq", "rplay"], "Did you mean 'replay'?"),
        (["queues", "creat"], "Did you mean 'create'?"),
        (["a\x1b[31m\nb"], "\\x1b"),
        (["--apps"], "No such option"),
        (["tasks", "--jsn"], "No such option"),
        (["tasks"], "aztask tasks needs an app: name it with -A"),
        (["worker"], "a worker needs an app"),
    ],
)
def test_wrong_usage_is_one_line(cli, arguments, words):
    ended = cli(*arguments)
    assert ended.code == 2
    assert words in ended.error
    assert ended.out == ""


@pytest.mark.parametrize("arguments", [[], ["dlq"]])
def test_without_a_command_the_help_is_shown(cli, arguments):
    ended = cli(*arguments)
    assert ended.code == 2
    assert ended.err.startswith("Usage: aztask")


class TestApp:
    @pytest.fixture
    def module(self, cli):
        return cli.module("main_shop", APP + "@app.task\ndef add(a, b): return a + b\n")

    def test_it_is_named_before_the_command_or_after_it(self, cli, module):
        for arguments in (("-A", module, "tasks"), ("tasks", "--app", f"{module}:app")):
            assert "main_shop" not in cli(*arguments).out
            assert "shop.add" in cli(*arguments).out

    def test_the_later_one_counts(self, cli, module):
        assert cli("-A", "nosuch", "tasks", "-A", module).code == 0
        assert cli("-A", module, "tasks", "-A", "nosuch").code == 2

    def test_the_environment_names_it(self, cli, module):
        assert "shop.add" in cli("tasks", AZTASK_APP=module).out

    def test_an_option_may_come_from_the_environment(self, cli, module):
        ended = cli("tasks", AZTASK_APP=module, AZTASK_TASKS_JSON="1")
        assert json.loads(ended.out)["task"] == "shop.add"

    def test_reading_without_it_uses_the_addresses_of_the_environment(self, cli):
        cli.app().send("shop.add", [1, 2], task_id="a")
        ended = cli("result", "a", AZTASK_BROKER=cli.address, AZTASK_RESULTS=cli.address)
        assert ended.code == 0
        assert "pending" in ended.out
        assert "default" in cli("queues").out

    def test_without_any_word_of_where_the_queues_are(self, cli):
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


def test_debugging_shows_the_traceback(cli):
    ended = cli("-A", "nosuch", "tasks", AZTASK_DEBUG="1")
    assert "Traceback" in ended.err
    assert ended.err.splitlines()[-1].startswith("aztask: error: there is no module")


def test_colour_is_given_up_when_asked(cli, monkeypatch):
    monkeypatch.setattr("click._compat.isatty", lambda stream: True)
    monkeypatch.setattr("click.utils.should_strip_ansi", lambda stream, color: color is False)
    cli.app().broker.declare("default")
    assert "\x1b[1m" in cli("queues", AZTASK_BROKER=cli.address).out
    assert "\x1b" not in cli("queues", NO_COLOR="1").out
