"""What a listing says of damaged rows: one line on stderr. Stdout is for those that can be read."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import click

from aztask.cli.failures import one_line
from aztask.cli.output import plural

NAMED: Final = 3
"""Rows that the line names; of the others it says how many there are."""


def warn_of_damage(what: str, damaged: Sequence[tuple[str, str]], then: str) -> None:
    """Name the damaged rows, if there are any.

    what: the noun, ``worker``. damaged: name and reason of each. then: what to do next.
    """
    if not damaged:
        return
    named = "; ".join(f"{name or '?'} ({reason})" for name, reason in damaged[:NAMED])
    more = f" and {len(damaged) - NAMED} more" if len(damaged) > NAMED else ""
    text = f"{plural(len(damaged), f'damaged {what}')}: {named}{more}; {then}"
    click.echo(f"aztask: warning: {one_line(text)}", err=True)
