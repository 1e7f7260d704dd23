"""Groups that load their commands late and suggest names."""

import click
import pytest

from aztask.operate.cli.group import CliGroup, LazyGroup


def test_an_unknown_command_gets_a_suggestion():
    group = CliGroup("shop", commands=[click.Command("worker"), click.Command("send")])
    with pytest.raises(click.UsageError, match=r"no command 'wroker'\. Did you mean 'worker'\?"):
        group.main(["wroker"], standalone_mode=False)


def test_an_unknown_option_is_left_to_click():
    group = CliGroup("shop", commands=[click.Command("worker")])
    with pytest.raises(click.NoSuchOption):
        group.main(["--wroker"], standalone_mode=False)


@pytest.fixture
def lazy(tmp_path, monkeypatch):
    """Two commands, of which one has no module."""
    package = tmp_path / "lazy_shop"
    package.mkdir()
    (package / "__init__.py").touch()
    (package / "good.py").write_text(
        "import click\n\n\n@click.command('good')\ndef command():\n    click.echo('done')\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    return LazyGroup("shop", package="lazy_shop", table={"good": "Do it.", "missing": "Cannot."})


def test_help_imports_no_command(lazy, capsys):
    lazy.main(["--help"], standalone_mode=False)
    out = capsys.readouterr().out
    assert "good     Do it." in out
    assert "missing  Cannot." in out


def test_a_command_is_imported_when_it_is_run(lazy, capsys):
    lazy.main(["good"], standalone_mode=False)
    assert capsys.readouterr().out == "done\n"
    with pytest.raises(ModuleNotFoundError):
        lazy.main(["missing"], standalone_mode=False)


def test_commands_keep_the_order_of_the_table(lazy):
    assert lazy.list_commands(click.Context(lazy)) == ["good", "missing"]
    assert lazy.get_command(click.Context(lazy), "nosuch") is None
