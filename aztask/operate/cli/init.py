"""``aztask init NAME``: write a small project that works, with its tests and settings."""

from __future__ import annotations

import keyword
import shutil
import sys
from importlib import resources
from pathlib import Path
from string import Template
from typing import Final

import click

from aztask.operate.cli.failures import CommandFailed
from aztask.support.display import printable, visible

FILES: Final = {
    "README.md": "README.md",
    ".gitignore": "gitignore",
    "pyproject.toml": "pyproject.toml",
    "{name}/__init__.py": "init.py",
    "{name}/app.py": "app.py",
    "{name}/tasks.py": "tasks.py",
    "tests/test_tasks.py": "test_tasks.py",
    "settings/local.sh": "local.sh",
    "settings/emulator.sh": "emulator.sh",
    "settings/azure.sh": "azure.sh",
}
"""The files of a project, and their templates under ``aztask/operate/cli/project/``."""

LONGEST: Final = 40
TAKEN: Final = frozenset({"aztask", "pytest", "mypy", "settings", "test", "tests"})
"""Names of packages that the project itself imports or has."""


@click.command("init")
@click.argument("name")
def command(name: str) -> None:
    """Write a small project into the new folder NAME.

    It has an app, two tasks, a test with a real worker, settings for this machine, the emulator and
    Azure, and a README. NAME becomes a Python package: letters, digits and underscores.
    """
    if problem := _problem(name):
        raise click.UsageError(problem, click.get_current_context())
    folder = Path(name)
    try:
        folder.mkdir()
    except FileExistsError:
        raise CommandFailed(f"{name!r} exists already; choose another name") from None
    try:
        _write(folder, name)
    except BaseException:
        shutil.rmtree(folder, ignore_errors=True)  # made above, so all of it is ours
        raise
    click.echo(f"wrote {visible(name)}: {len(FILES)} files; read {visible(name)}/README.md")
    click.echo(
        f"Try:\n  cd {name} && . settings/local.sh\n"
        f"  aztask send {name}.count_words --args '[\"a b c\"]'\n  aztask worker --burst",
        err=True,
    )


def _problem(name: str) -> str:
    """Why the name cannot be the name of a project; "" if it can."""
    shown = printable(name, 60)
    plain = name.lower().replace("-", "_").replace(" ", "_")
    if not (name.isascii() and name.isidentifier()) or name != plain:
        usable = plain.isascii() and plain.isidentifier() and len(plain) <= LONGEST
        hint = f"; write {plain}" if usable else ""
        return f"{shown} cannot name a project: use lower-case letters, digits and '_'{hint}"
    if len(name) > LONGEST:
        return f"{shown} is too long to name a project: use at most {LONGEST} characters"
    if name in TAKEN or keyword.iskeyword(name) or name in sys.stdlib_module_names:
        return f"{shown} is the name of another Python module; write {name}_tasks"
    return ""


def _write(folder: Path, name: str) -> None:
    """Write all files. If the process dies in between, delete the folder and run it again."""
    templates = resources.files("aztask.operate.cli") / "project"
    for path, template in FILES.items():
        text = (templates / f"{template}.tmpl").read_text(encoding="utf-8")
        target = folder / path.format(name=name)
        target.parent.mkdir(exist_ok=True)
        target.write_text(Template(text).substitute(name=name), encoding="utf-8")
