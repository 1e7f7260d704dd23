"""Progress on stderr: on a terminal one line that is rewritten, elsewhere a line now and then."""

from __future__ import annotations

import shutil
import sys
import time
from collections.abc import Callable

import click

BAR_CELLS = 30
REDRAW_SECONDS = 0.1
LINE_SECONDS = 2.0


class Progress:
    """Shows how many of `total` items are done, and how fast."""

    def __init__(
        self, total: int, noun: str, *, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._total = total
        self._noun = noun
        self._clock = clock
        self._live = sys.stderr is not None and sys.stderr.isatty()
        self._started = clock()
        self._drawn_at = self._started - (REDRAW_SECONDS if self._live else 0.0)

    def show(self, done: int, note: str = "", *, last: bool = False) -> None:
        """Show the progress, unless it was shown a moment ago. last: show it in any case."""
        now = self._clock()
        pause = REDRAW_SECONDS if self._live else LINE_SECONDS
        if not last and now - self._drawn_at < pause:
            return
        self._drawn_at = now
        rate = done / max(now - self._started, 1e-6)
        text = f"{done:,} of {self._total:,} {self._noun}, {rate:,.0f}/s{note}"
        if not self._live:
            click.echo(text, err=True)
            return
        filled = BAR_CELLS * done // max(1, self._total)
        bar = f"[{'#' * filled}{'-' * (BAR_CELLS - filled)}] "
        width = shutil.get_terminal_size().columns - 1
        click.echo(f"\r{(bar + text)[:width]}\x1b[K", err=True, nl=last)

    def clear(self) -> None:
        """Erase the line before something else is written."""
        if self._live:
            click.echo("\r\x1b[K", err=True, nl=False)
