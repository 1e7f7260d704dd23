"""``aztask init NAME``: write a small project that works, with its tests and settings."""

from __future__ import annotations

import keyword
import platform
import shutil
import sys
from importlib import resources
from pathlib import Path
from string import Template
from typing import Final

import click

from aztask.operate.cli.failures import CommandFailed
from aztask.support.display import printable, visible

SHELLS: Final = {
    "sh": ("# {}", "export {}='{}'", ". {}", "\n"),
    "ps1": ("# {}", "$env:{} = '{}'", ". {}", "\n"),
    "cmd": ("@rem {}", '@set "{}={}"', "{}", "\r\n"),
}
"""{a shell's files: its remark, its setting, how a file is called, how lines end}"""

FILES: Final = {
    "README.md": "README.md",
    ".gitignore": "gitignore",
    "pyproject.toml": "pyproject.toml",
    "{name}/__init__.py": "init.py",
    "{name}/app.py": "app.py",
    "{name}/tasks.py": "tasks.py",
    "tests/test_tasks.py": "test_tasks.py",
    **{
        f"settings/{place}.{shell}": f"{place}.settings"
        for place in ("local", "emulator", "azure")
        for shell in SHELLS
    },
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
    click.echo("\n  ".join(["Try:", *first_commands(name)]), err=True)


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
        made = Template(text).substitute(name=name)
        ending = "\n"  # on Windows too: Git Bash and WSL read these files
        if template.endswith(".settings"):
            made, ending = _settings(path, made)
        target.write_text(made, encoding="utf-8", newline=ending)


def _settings(path: str, text: str) -> tuple[str, str]:
    """Lines such as ``NAME=value`` in the words of the shell that reads the file; how they end."""
    remark, setting, call, ending = SHELLS[path.rpartition(".")[2]]
    typed = call.format(path.replace("/", "\\") if path.endswith(".cmd") else path)
    lines = [remark.format(f"Type: {typed}")]
    for line in text.splitlines():
        name, _, value = line.partition("=")
        lines.append(setting.format(name, value) if line[0] != "#" else remark.format(line[2:]))
    return "\n".join([*lines, ""]), ending


def first_commands(name: str) -> list[str]:
    """What a reader types in the folder of the project, in the shell of this system."""
    if platform.system() == "Windows":  # PowerShell has no `&&`, and removes quotes inside others
        send = f'aztask send {name}.add_up --args "[[1.5, 2]]"'
        return [f"cd {name}", ". settings/local.ps1", send, "aztask worker --burst"]
    send = f"aztask send {name}.count_words --args '[\"a b c\"]'"
    return [f"cd {name} && . settings/local.sh", send, "aztask worker --burst"]
