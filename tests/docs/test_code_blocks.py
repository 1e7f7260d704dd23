"""Every code block of the README and of docs/ runs, page by page, as a reader would run it.

The blocks of a page share one empty directory and the environment that its commands export.
A ``python`` block is run as a script; one whose first line is a comment such as ``# shop.py`` is
saved under that name first. A ``console`` block holds commands after ``$``; what follows a command
is its expected output, where ``...`` stands for anything, and a line ``...`` for any lines. A
command succeeds, unless it ends with ``# exit N``; one that ends with ``&`` is stopped at the end
of the page. A block does not run only if a comment just before it says why:
``<!-- not run: REASON -->``. Every language but these two and plain data needs such a comment.
"""

import os
import re
import shlex
import signal
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest
from programs import need_java

ROOT = Path(__file__).parents[2]
PAGES = sorted(
    [ROOT / "README.md", *(p for p in (ROOT / "docs").rglob("*.md") if "_build" not in p.parts)]
)
DATA = ("text", "json", "toml", "ini", "yaml")
INHERITED = ("HOME", "JAVA_HOME", "LANG", "SPARK_SUBMIT_OPTS", "SPARK_LAUNCHER_OPTS")
SECONDS = 120
BLOCK = re.compile(
    r"(?:^<!-- not run: *(?P<reason>\S[^\n]*?) *-->\n+)?"
    r"^(?P<fence>```+)(?P<language>[^\n`]*)\n(?P<code>.*?)^(?P=fence)[ ]*$",
    re.MULTILINE | re.DOTALL,
)


@dataclass(frozen=True)
class Block:
    """One fenced block: where it is, what it says, and why it is not run, if it is not."""

    line: int
    language: str
    code: str
    reason: str | None


def blocks_of(text):
    """All fenced blocks. A MyST directive such as ``{note}`` is prose, not code."""
    found = []
    for match in BLOCK.finditer(text):
        if not match["language"].startswith("{"):
            line = text.count("\n", 0, match.start("fence")) + 1
            found.append(Block(line, match["language"].strip(), match["code"], match["reason"]))
    return found


class Page:
    """The directory, the environment and the background processes of one page's blocks."""

    def __init__(self, folder):
        need_java()
        self.folder = folder / "page"
        self.folder.mkdir()
        self.exports = folder / "exports"
        self.exports.touch()
        self.output = folder / "output"
        tools = folder / "bin"
        tools.mkdir()
        # Scripts and no links: an interpreter finds its virtual environment by its own path.
        interpreter = shlex.quote(sys.executable)
        for name, start in (("python", interpreter), ("aztask", f"{interpreter} -m aztask")):
            (tools / name).write_text(f'#!/bin/sh\nexec {start} "$@"\n')
            (tools / name).chmod(0o755)
        self.environ = {name: os.environ[name] for name in INHERITED if name in os.environ}
        self.environ |= {
            "PATH": f"{tools}:{os.environ['PATH']}",
            "PYTHONPATH": f"{self.folder}:{ROOT}",
            "PYTHONDONTWRITEBYTECODE": "1",
        }
        self.groups = []

    def run(self, block):
        """Run a block; AssertionError if it does not do what it shows."""
        if block.language == "python":
            name = re.match(r"# ([\w/]+\.py)\n", block.code)
            path = self.folder / (name[1] if name else f"block_{block.line}.py")
            path.write_text(block.code)
            self.command(f"{shlex.quote(sys.executable)} {path.relative_to(self.folder)}", "...")
            return
        for command, expected in commands_of(block.code):
            self.command(command, expected)

    def command(self, command, expected):
        """Run one command in bash and compare its exit status and its output."""
        wanted = re.search(r"\s# exit (\d+)$", command)
        keep = f"{{ {command}\n}}; code=$?; export -p > {self.exports}; exit $code"
        with self.output.open("w+b") as output:
            process = subprocess.Popen(
                ["bash", "-c", f". {self.exports}; {keep}"],
                cwd=self.folder,
                env=self.environ,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
            self.groups.append(process.pid)
            code = process.wait(timeout=SECONDS)
            output.seek(0)
            shown = output.read().decode(errors="replace")
        assert code == (int(wanted[1]) if wanted else 0), f"$ {command}\nexit {code}\n{shown}"
        assert matches(shown, expected), f"$ {command}\n{shown}\nis not\n{expected}"

    def close(self):
        """Stop what still runs."""
        for group in self.groups:
            try:
                os.killpg(group, signal.SIGKILL)
            except ProcessLookupError:
                continue


def commands_of(code):
    """A console block's commands, each with the output shown, ``...`` where there is none."""
    assert code.startswith("$ "), "a console block begins with a command: $ ..."
    for part in re.split(r"^\$ ", code, flags=re.MULTILINE)[1:]:
        lines = part.rstrip("\n").split("\n")
        end = next(n for n, line in enumerate(lines) if not line.endswith("\\"))
        yield "\n".join(lines[: end + 1]), "\n".join(lines[end + 1 :]).strip() or "..."


def matches(shown, expected):
    """Whether an output is the expected one, where ``...`` stands for anything."""
    pattern = re.escape(expected).replace(r"\.\.\.", ".*?").replace("\\\n", "\n")
    pattern = re.sub(r"(?m)^\.\*\?\n", r"(?:.*\\n)*?", pattern)  # a line of its own: any lines
    pattern = re.sub(r"(?m)^\.\*\?\Z", r"[\\s\\S]*", pattern)
    return re.fullmatch(pattern, shown.strip()) is not None


@pytest.mark.parametrize("path", PAGES, ids=[str(path.relative_to(ROOT)) for path in PAGES])
def test_the_blocks_of(path, tmp_path):
    page = Page(tmp_path)
    try:
        for block in blocks_of(path.read_text(encoding="utf-8")):
            if block.reason is None and block.language not in DATA:
                assert block.language in ("python", "console"), f"line {block.line}: {block}"
                page.run(block)
    finally:
        page.close()
