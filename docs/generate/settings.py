"""Writes what follows from the table of settings in `aztask.config`.

Usage: python docs/generate/settings.py

It writes the types of the options, ``aztask/app/options.py``, and the tables of the reference page,
``docs/reference/settings.md``. A test compares both with what this would write.
"""

from __future__ import annotations

from pathlib import Path

from aztask.config import QueueSettings, Settings
from aztask.support.display import Secret
from aztask.support.settings import Setting, option_of, table_of

ROOT = Path(__file__).parents[2]
OPTIONS = ROOT / "aztask" / "app" / "options.py"
REFERENCE = ROOT / "docs" / "reference" / "settings.md"
MARKS = ("<!-- settings -->\n", "<!-- end of settings -->\n")

HEAD = '''"""The names and types of what ``App(...)`` and ``app.queue(...)`` take.

Written by docs/generate/settings.py from the settings in `aztask.config`; edit those.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import timedelta
from typing import TypedDict

from aztask.message.encryption import ContentCodec
from aztask.retry import RetryStrategy
from aztask.support.display import Secret


'''


def options() -> str:
    """The source of ``aztask/app/options.py``."""
    app = _class("AppOptions", "``App(...)``", Settings)
    queue = _class("QueueOptionNames", "``app.queue(name, ...)``", QueueSettings)
    return HEAD + app + "\n\n" + queue


def _class(name: str, what: str, kind: type) -> str:
    lines = [
        f"class {name}(TypedDict, total=False):",
        f'    """The options of {what}, described in docs/reference/settings.md."""',
        "",
    ]
    # App(...) has a parameter of its own for the directory of events
    rows = {field: row for field, row in table_of(kind).items() if field != "events"}
    lines += [f"    {option_of(field)}: {row.takes}" for field, row in rows.items()]
    return "\n".join(lines) + "\n"


def reference() -> str:
    """The tables of the reference page."""
    app, queue = _table(Settings), _table(QueueSettings)
    return "\n".join(["## Settings of an app", "", *app, "## Settings of a queue", "", *queue])


def _table(kind: type) -> list[str]:
    lines = []
    for field, row in table_of(kind).items():
        default = kind.__dataclass_fields__[field].default
        lines += [f"### `{option_of(field)}`", "", row.text, "", *_facts(row, default)]
        where = "App(...)" if kind is Settings else 'app.queue("slow", ...)'
        example = where.replace("...", f"{option_of(field)}={row.example}")
        lines += [f"- example: `{example}`".replace("App(", 'App("shop", '), ""]
    return lines


def _facts(row: Setting, default: object) -> list[str]:
    facts = [f"- type: `{row.takes}`", f"- default: {_default(default)}"]
    if row.variable:
        facts.append(f"- environment: `{row.variable}`, or a file that `{row.variable}_FILE` names")
    return facts


def _default(value: object) -> str:
    if value is None:
        return "none"
    assert not isinstance(value, Secret)
    return f"`{value!r}`"


def page(text: str) -> str:
    """The reference page `text` with its tables written anew."""
    before, rest = text.split(MARKS[0])
    return before + MARKS[0] + "\n" + reference() + MARKS[1] + rest.split(MARKS[1])[1]


if __name__ == "__main__":
    OPTIONS.write_text(options(), encoding="utf-8")
    REFERENCE.write_text(page(REFERENCE.read_text(encoding="utf-8")), encoding="utf-8")
