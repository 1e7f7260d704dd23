"""Repeating a reading command until Ctrl-C: in place on a terminal, else one after another."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from typing import Final

import click

from aztask.cli.failures import one_line
from aztask.errors import BrokerUnavailable

CLEAR: Final = "\x1b[H\x1b[J"
"""Moves to the first line and erases from there: unlike a cleared screen, it does not flicker."""


def watch(
    show: Callable[[], None],
    interval: float,
    *,
    redraw: bool = True,
    sleep: Callable[[float], None] = time.sleep,
) -> None:
    """Call `show` every `interval` seconds; returns after Ctrl-C.

    redraw: on a terminal, each output takes the place of the previous one.

    If the broker becomes unreachable, a line on stderr says so and the next call tries again. Every
    other error is raised, and so is this one at the first call.
    """
    live = redraw and sys.stdout is not None and sys.stdout.isatty()
    first = True
    try:
        while True:
            if live:
                click.echo(CLEAR, nl=False)
            try:
                show()
            except BrokerUnavailable as error:
                if first:
                    raise
                click.echo(f"aztask: {one_line(str(error))}; still watching", err=True)
            first = False
            if sys.stdout is not None:
                sys.stdout.flush()  # a program that reads our output waits for this line
            sleep(interval)
    except KeyboardInterrupt:
        if live:
            click.echo()
