"""Repeating a reading command until Ctrl-C: in place on a terminal, else one after another."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from typing import Final

import click

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
    """
    live = redraw and sys.stdout is not None and sys.stdout.isatty()
    try:
        while True:
            if live:
                click.echo(CLEAR, nl=False)
            show()
            if sys.stdout is not None:
                sys.stdout.flush()  # a program that reads our output waits for this line
            sleep(interval)
    except KeyboardInterrupt:
        if live:
            click.echo()
