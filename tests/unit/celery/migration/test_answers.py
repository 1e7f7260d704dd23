"""The table of answers has every part of the installed Celery, and nothing else."""

from __future__ import annotations

import importlib.util
import inspect
import re
from pathlib import Path

import celery
import click
import pytest
from celery import canvas, exceptions, result, schedules, signals
from celery.app import autoretry, defaults
from celery.app.base import Celery
from celery.app.task import Context, Task
from celery.bin.celery import celery as celery_command
from celery.bin.worker import worker as worker_command
from celery.worker.control import Panel

from aztask import errors
from aztask.celery.migration import answers
from aztask.celery.migration.answers import NO, NOT_NEEDED, SECTIONS
from aztask.operate.cli.main import cli

DOCS = Path(__file__).parents[4] / "docs"
GENERATOR = DOCS / "generate" / "migration.py"


def public(cls: type) -> set[str]:
    return {name for name in vars(cls) if not name.startswith("_")}


def parameters(function: object) -> set[str]:
    found = inspect.signature(function).parameters.values()  # type: ignore[arg-type]
    return {each.name for each in found if each.kind is not each.VAR_KEYWORD} - {"self"}


def commands(command: click.Command, path: str) -> set[str]:
    found = set()
    if isinstance(command, click.Group):
        context = click.Context(command)
        for name in command.list_commands(context):
            child = command.get_command(context, name)
            assert child is not None
            found |= {f"{path} {name}"} | commands(child, f"{path} {name}")
    return found


def task_parts() -> set[str]:
    options = parameters(Celery._task_from_fun) - {"fun"}
    retries = re.findall(r"'(\w+)',\s+getattr\(task", inspect.getsource(autoretry))
    assert len(retries) >= 6
    return public(Task) | options | set(retries)


def send_options() -> set[str]:
    documented = re.findall(r"^ {12}(\w+) \(", Task.apply_async.__doc__ or "", re.MULTILINE)
    assert "countdown" in documented
    known = parameters(Task.apply_async) | parameters(Celery.send_task) | set(documented)
    return known - {"name"}


def names() -> set[str]:
    found = {f"celery.{name}" for name in celery.__all__ if name.isidentifier()}
    found -= {name for name in found if re.match(r"celery\.(_|VERSION|version|SERIES)", name)}
    for module in (exceptions, result, schedules):
        found |= {f"{module.__name__}.{name}" for name in module.__all__}
    found |= {f"celery.{name}" for name in canvas.__all__}
    return found


def result_parts() -> set[str]:
    return public(result.AsyncResult) - {"TimeoutError", "app", "backend"}


SIGNATURE_DATA = {"TYPES", "from_dict", "register_type", "subtask_type", "immutable", "app", "type"}
SIGNATURE_DATA |= {"name", "AsyncResult", "args", "id", "items", "kwargs", "options", "parent_id"}
SIGNATURE_DATA |= {"partial", "root_id", "task"}

PARTS = {
    "settings": lambda: set(dict(defaults.flatten(defaults.NAMESPACES))),
    "signals": lambda: set(signals.__all__),
    "task": task_parts,
    "request": lambda: public(Context),
    "send": send_options,
    "app": lambda: public(Celery),
    "names": names,
    "signature": lambda: public(canvas.Signature) - SIGNATURE_DATA,
    "result": result_parts,
    "control": lambda: set(Panel.meta),
    "commands": lambda: commands(celery_command, "celery"),
    "worker": lambda: {
        name
        for each in (celery_command, worker_command)
        for option in each.params
        for name in option.opts
    },
}


@pytest.mark.parametrize("section", SECTIONS)
def test_nothing_of_celery_is_missing(section: str) -> None:
    missing = PARTS[section]() - answers.answers(section).keys()
    assert not missing, (
        f"add to [{section}] of aztask/celery/migration/answers.toml: {sorted(missing)}"
    )


@pytest.mark.parametrize("section", ["settings", "signals", "commands", "worker"])
def test_nothing_is_answered_that_celery_does_not_have(section: str) -> None:
    assert not answers.answers(section).keys() - PARTS[section]()


@pytest.mark.parametrize("section", SECTIONS)
def test_each_name_has_one_answer_that_says_something(section: str) -> None:
    rows = answers.rows()[section]
    all_names = [name for row in rows for name in answers.split_names(row)]
    assert sorted(all_names) == sorted(set(all_names))
    for name, text in rows.items():
        rest = text.removeprefix(NO).removeprefix(NOT_NEEDED).strip()
        assert len(rest) > 3 and not text.endswith("."), name
        assert not re.match(r"no\b(?!, because )|not needed(?!: )", text, re.IGNORECASE), name


def test_the_names_of_before_celery_4_are_known() -> None:
    for old, new in defaults._TO_NEW_KEY.items():
        answer = answers.setting_answer(old)
        assert answer is not None and answer.name == new


def test_a_setting_that_is_not_celerys_has_no_answer() -> None:
    assert answers.setting_answer("CELERY_NONSENSE") is None
    assert answers.setting_answer("DEBUG") is None


def test_the_page_shows_the_table() -> None:
    spec = importlib.util.spec_from_file_location("generate_migration", GENERATOR)
    assert spec is not None and spec.loader is not None
    generator = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(generator)
    text = generator.PAGE.read_text(encoding="utf-8")
    assert text == generator.render(text), "python docs/generate/migration.py writes the tables"


def test_the_pages_that_answers_name_exist() -> None:
    for section in SECTIONS:
        for text in answers.rows()[section].values():
            for page in re.findall(r"\b(?:how-to|reference)/[\w/-]+", text):
                assert (DOCS / f"{page}.md").exists(), page


def test_the_commands_and_names_that_answers_name_exist() -> None:
    context = click.Context(cli)
    for section in SECTIONS:
        for text in answers.rows()[section].values():
            for name in re.findall(r"`aztask (?:-A \S+ )?([a-z]+)", text):
                assert name in cli.list_commands(context), text
            for name in re.findall(r"`aztask\.errors\.(\w+)", text):
                assert hasattr(errors, name), text
