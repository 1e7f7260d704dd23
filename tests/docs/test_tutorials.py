"""The three applications of docs/tutorials run from their pages, wherever the queues are.

Rules
1. A page's blocks are all that runs: tests/docs/test_code_blocks.py runs them in a file, this file
   runs them on Azurite and on the emulator.
2. Only the lines that choose the place are exchanged, for those that docs/tutorials/index.md has.
   In these only the ports are, for the services of a test listen on free ones.
"""

import re
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path

import pytest
from azurite import account_of, running, storing
from test_code_blocks import DATA, ROOT, Page, blocks_of

from aztask.queues.servicebus.admin import ADMIN_VARIABLE
from aztask.testing import emulator

TUTORIALS = ROOT / "docs" / "tutorials"
PAGES = sorted(path for path in TUTORIALS.glob("*.md") if path.name != "index.md")
LOCAL = "In a file"
PLACES = ("On Azurite", "On the local Service Bus")


def lines_of(place: str) -> str:
    """The commands that the first page has for a place."""
    text = (TUTORIALS / "index.md").read_text(encoding="utf-8")
    section = text.partition(f"\n## {place}\n")[2].partition("\n## ")[0]
    (block,) = blocks_of(section)
    return block.code


@contextmanager
def service(place: str, folder: Path) -> Iterator[tuple[str, dict[str, str]]]:
    """Start what the place needs; gives its lines, and what else the ports of a test need."""
    lines = lines_of(place)
    with ExitStack() as stack:
        if place == "On Azurite":
            queues = stack.enter_context(running(folder / "queue"))
            stores = stack.enter_context(storing(folder))
            yield (
                lines.replace("UseDevelopmentStorage=true", f"'{account_of(queues, *stores)}'"),
                {},
            )
        else:
            bus = stack.enter_context(emulator())
            at = {ADMIN_VARIABLE: bus.admin_connection_string}
            yield lines.replace(":5672", f":{bus.port}"), at


def test_there_are_three_applications_and_each_begins_with_its_place() -> None:
    assert [path.stem for path in PAGES] == ["crawler", "invoices", "nightly-import"]
    for path in PAGES:
        codes = [block.code for block in blocks_of(path.read_text(encoding="utf-8"))]
        assert codes.count(lines_of(LOCAL)) == 1 and codes[0] == lines_of(LOCAL)
        assert not re.search("local://|AZTASK_BROKER|AZTASK_RESULTS", "".join(codes[1:]))


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("path", PAGES, ids=[path.stem for path in PAGES])
def test_an_application(path: Path, place: str, tmp_path: Path) -> None:
    with service(place, tmp_path) as (lines, more):
        page = Page(tmp_path)
        page.environ |= more
        try:
            for block in blocks_of(path.read_text(encoding="utf-8")):
                assert block.reason is None and block.language not in DATA, f"line {block.line}"
                chosen = block.code == lines_of(LOCAL)
                page.run(replace(block, code=lines) if chosen else block)
        finally:
            page.close()
