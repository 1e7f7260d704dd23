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
