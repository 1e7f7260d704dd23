"""Writes the tables in ``docs/coming-from-celery.md`` from ``answers.toml`` of the migration.

Usage: python docs/generate/migration.py

A test compares the page with what this would write.
"""

from __future__ import annotations

import re
from pathlib import Path

from aztask.celery.migration.answers import SECTIONS, rows

PAGE = Path(__file__).parents[1] / "coming-from-celery.md"
MARKS = ("<!-- answers -->\n", "<!-- end of answers -->\n")


def render(text: str) -> str:
    """`text` of the page with its tables written again."""
    before, _, rest = text.partition(MARKS[0])
    _, _, after = rest.partition(MARKS[1])
    return before + MARKS[0] + "".join(table(section) for section in SECTIONS) + MARKS[1] + after


def table(section: str) -> str:
    """The heading and the table of one section."""
    lines = [f"\n### {SECTIONS[section]}\n", "| Celery | aztask |", "|---|---|"]
    for names, text in rows()[section].items():
        shown = ", ".join(f"`{name.strip()}`" for name in names.split(","))
        lines.append(f"| {shown} | {linked(text)} |")
    return "\n".join(lines) + "\n"


def linked(text: str) -> str:
    """An answer in which the named pages are links, and bars do not end a cell."""
    text = re.sub(r"\b((?:how-to|reference)/[\w/-]+)", r"{doc}`\1`", text)
    return text.replace("|", "\\|")


if __name__ == "__main__":
    PAGE.write_text(render(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
