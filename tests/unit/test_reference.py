"""The reference is complete and up to date: every public name and option, as the source has it."""

import ast
import importlib.util
import inspect
import re
import sys
from pathlib import Path

import click
import pytest

import aztask
from aztask import errors
from aztask.context import Context, TaskLease
from aztask.operate.cli.main import cli
from aztask.result import AsyncResult
from aztask.session import Session
from aztask.task import SendOptions, Task, TaskOptions

ROOT = Path(__file__).parents[2]
GENERATE = ROOT / "docs" / "generate"
REFERENCE = ROOT / "docs" / "reference"
COMMAND = "python docs/generate/api.py"


@pytest.fixture(scope="module")
def api():
    spec = importlib.util.spec_from_file_location("generate_api", GENERATE / "api.py")
    module = importlib.util.module_from_spec(spec)
    sys.path.insert(0, str(GENERATE))
    try:
        spec.loader.exec_module(module)
    finally:
        sys.path.remove(str(GENERATE))
    return module


@pytest.fixture(scope="module")
def docstring(api):
    return sys.modules["docstring"]


def page(name):
    return (REFERENCE / name).read_text(encoding="utf-8")


def headings():
    """Every heading of the reference that names something: ``## `App` ``."""
    text = "\n".join(page(path.name) for path in REFERENCE.glob("*.md"))
    return set(re.findall(r"(?m)^#+ `([^`]+)`$", text))


def test_the_pages_say_what_the_source_says(api):
    stale = [path.name for path in api.stale()]
    assert not stale, f"{', '.join(stale)}: a docstring or a signature has changed. Run: {COMMAND}"


def test_every_public_name_has_an_entry():
    assert set(aztask.__all__) - headings() == set()


def test_every_public_name_of_the_other_modules_has_an_entry():
    names = {
        name for module in ("testing", "celery/transport", "spark") for name in exported(module)
    }
    kombus_own = {"ALIAS", "Channel", "Transport"}
    assert names - kombus_own - headings() == set()


def exported(module):
    path = ROOT / "aztask" / module
    path = path / "__init__.py" if path.is_dir() else path.with_suffix(".py")
    for node in ast.parse(path.read_text(encoding="utf-8")).body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__":
            return ast.literal_eval(node.value)
    raise AssertionError(f"{module} has no __all__")


@pytest.mark.parametrize("options", [TaskOptions, SendOptions])
def test_every_option_of_a_task_and_of_a_send_is_described(options):
    _, _, section = page("tasks.md").partition(f"## `{options.__name__}`\n")
    section = section.partition("<!-- end of api -->")[0]
    for name in options.__annotations__:
        assert re.search(rf"(?m)^\* `{name}` \(`[^`]+`\): \S.{{10}}", section), name


@pytest.mark.parametrize(
    ("kind", "where"),
    [
        (aztask.App, "app.md"),
        (Task, "tasks.md"),
        (AsyncResult, "results.md"),
        (Context, "context.md"),
        (TaskLease, "context.md"),
        (Session, "context.md"),
    ],
)
def test_every_attribute_of_an_object_is_named(kind, where):
    source = inspect.getsource(kind.__init__)
    names = re.findall(r"\bself\.([a-z]\w*)\b(?:: [^=\n]+)? =(?!=)", source)
    assert [name for name in names if f"`{name}`" not in page(where)] == []


def test_every_error_has_a_cause_and_a_remedy():
    rows = re.findall(r"(?m)^\| (`.+?`) \| .{20,} \| .{5,} \|$", page("errors.md"))
    described = {name for row in rows for name in re.findall(r"`(\w+)`", row)}
    kinds = {k for k in vars(errors).values() if isinstance(k, type) and issubclass(k, Exception)}
    bases = {base.__name__ for kind in kinds for base in kind.__bases__} - {"ConfigurationError"}
    assert {kind.__name__ for kind in kinds} - bases - described == set()


def commands(command, path, context):
    """(path, command) of a command and of all below it."""
    yield path, command
    if isinstance(command, click.Group):
        inner = click.Context(command, info_name=path[-1], parent=context)
        for name in command.list_commands(inner):
            yield from commands(command.get_command(inner, name), (*path, name), inner)


def test_every_option_of_every_command_is_listed():
    sections = re.split(r"(?m)^#+ `(aztask [^`]+)`$", page("cli.md"))
    listed = dict(zip(sections[1::2], sections[2::2], strict=True))
    count = 0
    for path, command in commands(cli, ("aztask",), None):
        for option in command.params if len(path) > 1 else ():
            for name in option.opts if isinstance(option, click.Option) else ():
                if option.name != "app":
                    assert f"`{name}`" in listed[" ".join(path)], (path, name)
                    count += 1
    assert count > 100


@pytest.mark.parametrize(
    ("text", "described"),
    [
        ("Do. one: first. two: second; half.", {"one": "first.", "two": "second; half."}),
        ("Do.\n\none: first\ntwo: the\n    second", {"one": "first.", "two": "the second."}),
        ("Do.\n\n* one: first\n* two: second", {"one": "first.", "two": "second."}),
        ("``one``: first. ``two``: second.", {"one": "first.", "two": "second."}),
        ("one, two: both. Raises KeyError.", {"one": "both.", "two": "both."}),
        ("one: a. two: b; there is no three: c", {"one": "a.", "two": "b; there is no three: c."}),
    ],
)  # fmt: skip
def test_descriptions_are_found_however_they_are_written(docstring, text, described):
    assert docstring.parse(text, ["one", "two"]).parameters == described


def test_the_parts_around_the_descriptions_are_kept(docstring):
    text = "Do it.\n\none: first. Raises KeyError.\n\nMore of it::\n\n    code()\n\nEnd."
    parsed = docstring.parse(text, ["one"])
    assert parsed.lead == "Do it."
    assert parsed.parameters == {"one": "first."}
    assert parsed.tail == "Raises KeyError.\n\nMore of it:\n\n```text\ncode()\n```\n\nEnd."


def test_a_signature_is_written_as_the_source_has_it(api):
    assert "wait: float | timedelta = 10.0" in api.entry("aztask.App")
    assert "wait: float | timedelta = 10.0" not in api.entry("aztask.App", how="fields")
    assert "App(\n    name: str,\n    *," in api.entry("aztask.App")
    assert "`App(" not in api.entry("aztask.App", how="from-aztask")
    assert "task(function: Callable[P, R], /) -> Task[P, R]" in api.entry("aztask.App")


def test_attributes_that_a_class_describes_stay_apart_from_its_parameters(
    api, tmp_path, monkeypatch
):
    monkeypatch.setattr(api, "ROOT", tmp_path)
    (tmp_path / "made.py").write_text(
        'class A:\n    """It is.\n\n    * `name`: kept.\n    """\n\n'
        '    def __init__(self, name: str) -> None:\n        """name: given."""\n'
        'class B:\n    """It is.\n\n    name: told here.\n    """\n\n'
        "    def __init__(self, name: str) -> None: ...\n"
    )
    assert "* `name`: kept.\n\n* `name`: given." in api.entry("made.A")
    assert "* `name`: kept.\n\n" in api.entry("made.A", how="from-aztask")
    assert "It is.\n\n* `name`: told here." in api.entry("made.B")


def test_what_only_aztask_calls_is_left_out(api):
    assert "`Task.call`" in api.entry("aztask.Task")
    assert "`Task.call`" not in api.entry("aztask.Task", without=["call"])
    with pytest.raises(ValueError, match="Task has no public method cull"):
        api.entry("aztask.Task", without=["cull"])


def test_what_is_out_of_date_is_found(api, tmp_path, monkeypatch):
    good, bad = tmp_path / "good.md", tmp_path / "bad.md"
    mark = "<!-- api: aztask.errors.Snooze -->\nold\n<!-- end of api -->\n"
    good.write_text(api.page(mark))
    bad.write_text(mark)
    monkeypatch.setattr(api, "PAGES", tmp_path)
    assert api.stale() == [bad]
