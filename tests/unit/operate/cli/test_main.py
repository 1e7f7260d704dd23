import json
import sqlite3
import subprocess
import sys
from importlib import import_module

import click
import kombu
import pytest

from aztask.operate.cli.main import COMMANDS
from aztask.operate.cli.main import cli as group
from aztask.spark.cli import COMMANDS as SPARK_COMMANDS
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
        command = group.get_command(click.Context(group), name)
        assert command.name == name
        assert command.get_short_help_str(limit=100) == about
        assert f"  {name}" in ended.out


def test_help_of_the_pipeline_says_what_its_commands_say(cli):
    out = cli("spark", "--help").out
    for name, about in SPARK_COMMANDS.items():
        command = import_module(f"aztask.spark.cli.{name}").command
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
        reads = path[-1:] in [("list",), ("groups",), ("show",), ("result",), ("tasks",), ("peek",)]
        if reads or path in [("queues",), ("workers",), ("demo",)]:
            assert any(param.name == "json" for param in command.params), path


def test_version(cli):
    assert cli("--version").out == f"aztask {__version__}\n"
    assert cli("tasks", "--help", AZTASK_VERSION="1").out.startswith("Usage:")


@pytest.mark.parametrize("words", [("--version", "--json"), ("--json", "--version")])
def test_the_versions_for_a_bug_report(cli, words):
    found = json.loads(cli(*words).out)
    assert found["aztask"] == __version__
    assert found["sqlite"] == sqlite3.sqlite_version
    assert found["libraries"]["kombu"] == kombu.__version__


def test_json_before_a_command_says_where_it_belongs(cli):
    ended = cli("--json", "tasks")
    assert ended.code == 2
    assert "--json belongs after the command, or beside --version" in ended.error


def test_help_imports_neither_kombu_nor_an_sdk():
    code = (
        "import sys\nfrom aztask.operate.cli import main\nassert main.run(['--help']) == 0\n"
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


UNDECODABLE = "\udcff\udcfe"
ESCAPES = "a\x1b[31m\x07b"
HUGE = "99999999999999999999999"
WRONG_INPUT = [
    (["result", "--limit", HUGE], 2, "--limit"),
    (["dlq", "list", "--limit", HUGE], 2, "--limit"),
    (["worker", "-A", "wrongs", "--burst", "--max-tasks", HUGE], 2, "--max-tasks"),
    (["worker", "-A", "wrongs", "--burst", "--concurrency", HUGE], 2, "--concurrency"),
    (["worker", "-A", "wrongs", "--burst", "--prefetch", HUGE], 2, "--prefetch"),
    (
        ["worker", "-A", "wrongs", "--burst", "--lease", "60s", "--max-lease", "10s"],
        4,
        "must be longer",
    ),
    (
        ["worker", "-A", "wrongs", "--burst", "--name", UNDECODABLE],
        2,
        "'\\udcff\\udcfe' is not valid text",
    ),
    (
        ["worker", "-A", "wrongs", "--burst", "--name", ESCAPES],
        2,
        "a\\x1b[31m\\x07b' holds characters",
    ),
    (["worker", "-A", "wrongs", "-Q", UNDECODABLE], 4, "cannot name a queue"),
    (["worker", "-A", ESCAPES], 2, "does not name an app"),
    (["worker", "-A", ""], 2, "does not name an app"),
    (["cancel", "nosuch"], 5, "no task has the id nosuch"),
    (["cancel", ESCAPES], 5, "no task has the id a\\x1b[31m\\x07b"),
    (["cancel", UNDECODABLE], 2, "is not valid text"),
    (["cancel", ""], 2, "is empty"),
    (["result", "nosuch"], 5, "no task 'nosuch'"),
    (["result", ESCAPES], 5, "no task"),
    (["result", UNDECODABLE], 2, "is not valid text"),
    (["result", ""], 2, "is empty"),
    (["running", "--task", UNDECODABLE], 2, "is not valid text"),
    (["dlq", "list", "--task", UNDECODABLE], 2, "is not valid text"),
    (["dlq", "list", "--reason", ""], 2, "is empty"),
    (["dlq", "list", "-Q", ""], 2, "empty name"),
    (["dlq", "list", "-Q", UNDECODABLE], 4, "cannot name a queue"),
    (["dlq", "show", ""], 2, "is empty"),
    (["dlq", "show", ESCAPES], 5, "no dead letter"),
    (["dlq", "show", f"@{HUGE}"], 5, "no dead letter"),
    (["dlq", "replay", "--yes", UNDECODABLE], 2, "is not valid text"),
    (["dlq", "replay", "--yes", f"@{HUGE}"], 5, "no dead letter"),
    (["dlq", "purge", "--yes", ESCAPES], 5, "no dead letter has the id a\\x1b[31m\\x07b"),
    (["queues", "create", ""], 4, "not empty"),
    (["queues", "create", ESCAPES], 4, "cannot name a queue"),
    (["queues", "delete", "--yes", UNDECODABLE], 4, "cannot name a queue"),
    (["send", ESCAPES], 2, "cannot be printed"),
    (["send", UNDECODABLE], 2, "cannot be printed"),
    (["send", "t", "--task-id", ESCAPES], 2, "--task-id 'a\\x1b[31m\\x07b' holds characters"),
    (["send", "t", "--task-id", UNDECODABLE], 2, "--task-id '\\udcff\\udcfe'"),
    (["send", "t", "--session", UNDECODABLE], 2, "session"),
    (["send", "t", "-q", ESCAPES], 4, "cannot name a queue"),
    (["send", "t", "--args", "[1e999]"], 2, "larger than any float"),
    (["send", "t", "--args", '["\udcff"]'], 2, "--help"),
    (["emulator", "--clock-offset", "1000000h", "--config", "missing"], 2, "more than ten years"),
    (["emulator", "--clock-offset", "-1000000h", "--config", "missing"], 2, "more than ten years"),
    (["emulator", "--host", ""], 4, "listening on ''"),
    (["emulator", "--queue", UNDECODABLE], 4, "is not a queue name"),
    (
        ["emulator", "--data", "/dev/null", "--port", "0", "--admin-port", "0"],
        4,
        "is a device, a pipe or a socket",
    ),
    (["demo", ""], 2, "does not exist"),
]
BUS = "Endpoint=sb://127.0.0.1:1;SharedAccessKeyName=a;SharedAccessKey=YWJj"
ADMIN, ENDPOINT = "AZTASK_SERVICEBUS_ADMIN", "AZTASK_SERVICEBUS_ENDPOINT"
EMULATOR = f"{BUS};UseDevelopmentEmulator=true"
WRONG_VARIABLES = [
    ({"AZTASK_BROKER": "local:///dev/null"}, 4, "'/dev/null' is a device, a pipe or a socket"),
    ({"AZTASK_BROKER": "local:///dev/null/x"}, 4, "cannot use '/dev/null/x'"),
    ({"AZTASK_BROKER": UNDECODABLE}, 4, "control character"),
    ({"AZTASK_BROKER": "Endpoint=sb://[::1"}, 4, "the host name in Endpoint is not valid"),
    ({"AZTASK_BROKER": "servicebus://"}, 4, "names nothing"),
    *(
        ({"AZTASK_BROKER": EMULATOR, ADMIN: text}, 4, f"{ADMIN} is not")
        for text in ("garbage", "Endpoint=sb://[;SharedAccessKey=b", "Endpoint=sb://h", UNDECODABLE)
    ),
    *(
        ({"AZTASK_BROKER": BUS, ENDPOINT: text}, 4, ENDPOINT)
        for text in ("[", "https://h", "h:99999", "\x1b", "sb://h")
    ),
    ({"AZTASK_RESULTS": "tables://"}, 4, "names nothing"),
    ({"AZTASK_QUEUES_JSON": UNDECODABLE}, 2, "--json"),
    ({"AZTASK_EVENTS_CONTAINER": "blob://", "AZTASK_EVENTS": "e"}, 4, "not a name of a blob"),
    (
        {"AZTASK_BROKER": "servicebus://shop-bus", "AZURE_AUTHORITY_HOST": "http://["},
        4,
        "azure-identity cannot use its environment variables",
    ),
    (
        {"AZTASK_BROKER": "storagequeue://shop", "AZURE_AUTHORITY_HOST": "http://["},
        4,
        "azure-identity cannot use its environment variables",
    ),
]


@pytest.mark.parametrize(
    ("arguments", "code", "text"), WRONG_INPUT, ids=[ascii(" ".join(r[0])) for r in WRONG_INPUT]
)
def test_wrong_input_is_one_line_and_the_right_exit_code(cli, arguments, code, text):
    cli.make_file()
    cli.module("wrongs", APP)
    ended = cli(*arguments, AZTASK_BROKER=cli.address, AZTASK_RESULTS=cli.address)
    assert text in ended.error
    assert (ended.code, ended.out) == (code, "")


@pytest.mark.parametrize(
    ("variables", "code", "text"), WRONG_VARIABLES, ids=[ascii(r[0]) for r in WRONG_VARIABLES]
)
def test_a_wrong_variable_is_one_line_and_the_right_exit_code(cli, variables, code, text):
    ended = cli("queues", **{"AZTASK_BROKER": cli.address, **variables})
    assert text in ended.error
    assert (ended.code, ended.out) == (code, "")
