"""Collects the dotted paths that users import, from what a revision tells them.

Run it with a revision to write `LIST` anew (``python tests/unit/publicpaths.py 07ed1de``): it reads
the user's pages, the examples, the entry points and Kombu's aliases there, and keeps each
path that can be imported; the others are names of spans, loggers and headers.
"""

import io
import re
import subprocess
import sys
import tarfile
import tempfile
from pathlib import Path

ROOT = Path(__file__).parents[2]
LIST = Path(__file__).with_name("publicpaths.txt")

PROJECT = ("aztask/operate/cli/project", "aztask/cli/project")
"""What `aztask init` writes, now and in the listed revision."""

READ = ("README.md", "docs", "examples", "setup.cfg", "aztask_kombu.py", *PROJECT)
ABOUT_THE_SOURCE = ("docs/generate/", "docs/benchmarks/", "docs/architecture.md", "docs/rules.md")
"""Not for users: they name modules as places of the source."""

NOT_IMPORTED = {
    "aztask.appqueues.AppQueues": "a part of App, which a docstring named",
    "aztask.worker.pool.loopwatch": "the logger in a line of a log",
}

_PATH = re.compile(r"\baztask(?:_kombu)?(?:\.[A-Za-z_]\w*)+(?::[A-Za-z_]\w*)?")
_IMPORT = re.compile(r"^ *from (aztask[\w.]*) import (\([^)]*\)|.+)$", re.MULTILINE)
_NAME = re.compile(r"\w+")


def paths_in(text):
    """The dotted paths of a text: as they are written, and those of its import statements."""
    found = {path.replace(":", ".") for path in _PATH.findall(text)}
    for module, names in _IMPORT.findall(text):
        listed = names.partition("#")[0].strip("()").split(",")
        for name in filter(None, (each.split(" as ")[0].strip() for each in listed)):
            if _NAME.fullmatch(name):
                found.add(f"{module}.{name}")
    return found


def collected(tree):
    """All paths that the pages, examples and entry points of a source tree name."""
    found = set()
    for place in READ:
        start = tree / place
        if place in PROJECT and not start.exists():
            continue
        for file in [start] if start.is_file() else sorted(start.rglob("*")):
            name = file.relative_to(tree).as_posix()
            if file.suffix in (".md", ".py", ".cfg", ".toml", ".txt", ".ipynb") and not (
                name.startswith(ABOUT_THE_SOURCE)
            ):
                found |= paths_in(file.read_text(encoding="utf-8"))
    return sorted(found - NOT_IMPORTED.keys())


def main(revision):
    archive = subprocess.run(
        ["git", "archive", revision], cwd=ROOT, check=True, capture_output=True
    ).stdout
    with tempfile.TemporaryDirectory() as folder:
        with tarfile.open(fileobj=io.BytesIO(archive)) as tar:
            tar.extractall(folder, filter="data")
        script = (
            "import pkgutil, sys\n"
            "for path in sys.stdin.read().split():\n"
            "    try:\n"
            "        pkgutil.resolve_name(path)\n"
            "    except Exception:\n"
            "        print('not importable:', path, file=sys.stderr)\n"
            "    else:\n"
            "        print(path)\n"
        )
        kept = subprocess.run(
            [sys.executable, "-c", script],
            input="\n".join(collected(Path(folder))),
            cwd=folder,
            env={"PYTHONPATH": folder, "PATH": ""},
            check=True,
            capture_output=True,
            text=True,
        )
    sys.stderr.write(kept.stderr)
    LIST.write_text(kept.stdout, encoding="utf-8")


if __name__ == "__main__":
    main(sys.argv[1])
