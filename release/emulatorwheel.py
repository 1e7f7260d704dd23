"""Builds a second wheel, ``aztask-emulator``: the local Service Bus alone, from the same source.

Usage: python release/emulatorwheel.py FOLDER

An extra can only add requirements, so the emulator has a wheel of its own, which needs click and
nothing else. Its package is called ``aztask_emulator``: both wheels can be installed together.

Rules
1. What the command imports is found in the source, module by module. Nothing is listed here.
2. A module keeps its place below the package. Only the names in its imports change.
3. Two builds of one revision give the same bytes, as in `backend`.
"""

from __future__ import annotations

import ast
import re
import runpy
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Final
from zipfile import ZipFile

sys.path.insert(0, str(Path(__file__).parent))

from backend import rewrite

ROOT: Final = Path(__file__).parents[1]
OLD: Final = "aztask"
NEW: Final = "aztask_emulator"
START: Final = "aztask.operate.cli.emulator"
REQUIRES: Final = ("click>=8.4",)
_IMPORT: Final = re.compile(rf"^(\s*(?:from|import)\s+){OLD}(?=[.\s])", re.MULTILINE)

README: Final = """\
# aztask-emulator

A local Azure Service Bus in one Python process, for tests and laptops. The SDKs work with it.

    aztask-emulator --port 5672 --admin-port 5300

It prints the connection strings. `aztask-emulator --help` lists the options. It is a part of
aztask, whose documentation says which SDKs were tried, and what is different from the service.
"""

MAIN: Final = f'''"""``aztask-emulator``: a local Service Bus, without the rest of aztask."""

from {NEW}.errors import AztaskError
from {NEW}.operate.cli.emulator import command


def main() -> None:
    """Run the command. Its options have environment variables, such as AZTASK_EMULATOR_PORT."""
    try:
        command(prog_name="aztask-emulator", auto_envvar_prefix="AZTASK_EMULATOR")
    except AztaskError as error:
        raise SystemExit(f"aztask-emulator: {{error}}") from None


if __name__ == "__main__":
    main()
'''


def file_of(module: str) -> Path | None:
    """The source of a module or package; None if there is none of that name."""
    base = ROOT.joinpath(*module.split("."))
    found = (base.with_suffix(".py"), base / "__init__.py")
    return next((each for each in found if each.is_file()), None)


def needed(text: str) -> Iterator[str]:
    """The names below aztask that a source imports; some are no modules but names in one."""
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith(f"{OLD}."):
            yield str(node.module)
            yield from (f"{node.module}.{alias.name}" for alias in node.names)
        elif isinstance(node, ast.Import):
            yield from (a.name for a in node.names if a.name.startswith(f"{OLD}."))


def modules() -> dict[str, Path]:
    """Every module that the command imports, with its source (rule 1)."""
    found: dict[str, Path] = {}
    waiting = [START]
    while waiting:
        module = waiting.pop()
        source = file_of(module)
        if module not in found and source is not None:
            found[module] = source
            waiting += needed(source.read_text(encoding="utf-8"))
    return found


def renamed(text: str) -> str:
    """A source that imports from the new package (rule 2)."""
    return _IMPORT.sub(rf"\g<1>{NEW}", text)


def contents(version: str) -> dict[str, str]:
    """The files of the wheel, by name, without its RECORD."""
    files = {f"{NEW}/__main__.py": MAIN, f"{NEW}/__init__.py": f'__version__ = "{version}"\n'}
    for source in modules().values():
        place = source.relative_to(ROOT / OLD)
        files[f"{NEW}/{place.as_posix()}"] = renamed(source.read_text(encoding="utf-8"))
        for folder in list(place.parents)[:-1]:
            files.setdefault(f"{NEW}/{folder.as_posix()}/__init__.py", "")
    info = f"{NEW}-{version}.dist-info"
    requires = "".join(f"Requires-Dist: {each}\n" for each in REQUIRES)
    files[f"{info}/METADATA"] = (
        f"Metadata-Version: 2.4\nName: aztask-emulator\nVersion: {version}\n"
        "Summary: A local Service Bus for tests and laptops: AMQP 1.0 in one Python process\n"
        f"License-Expression: MIT\nLicense-File: LICENSE\nRequires-Python: >=3.11\n{requires}"
        "Provides-Extra: tls\nRequires-Dist: cryptography>=43; extra == 'tls'\n"
        f"Description-Content-Type: text/markdown\n\n{README}"
    )
    files[f"{info}/WHEEL"] = (
        "Wheel-Version: 1.0\nGenerator: aztask\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
    )
    files[f"{info}/entry_points.txt"] = (
        f"[console_scripts]\naztask-emulator = {NEW}.__main__:main\n"
    )
    files[f"{info}/licenses/LICENSE"] = (ROOT / "LICENSE").read_text(encoding="utf-8")
    files[f"{info}/RECORD"] = ""  # `rewrite` fills it
    return files


def build(folder: Path) -> Path:
    """Write the wheel into the folder; returns its file."""
    version: str = runpy.run_path(str(ROOT / OLD / "version.py"))["__version__"]
    wheel = folder / f"{NEW}-{version}-py3-none-any.whl"
    with ZipFile(wheel, "w") as archive:
        for name, text in contents(version).items():
            archive.writestr(name, text)
    rewrite(wheel)
    return wheel


if __name__ == "__main__":
    sys.stdout.write(f"{build(Path(sys.argv[1]))}\n")
