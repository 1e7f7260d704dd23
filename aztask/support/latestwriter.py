"""Output that may stay unread: the newest text is written, and the caller never waits for it."""

from __future__ import annotations

import os
import threading


class LatestWriter:
    """Writes texts to a descriptor in a thread of its own.

    A pipe that is full and a terminal that is stopped (Ctrl-S) block that thread alone. A text that
    still waits when the next one comes is dropped. When the reader has gone, nothing is written.
    """

    def __init__(self, descriptor: int) -> None:
        """`descriptor`: stays open. The thread starts with the first text."""
        self._descriptor = descriptor
        self._changed = threading.Condition()
        self._text: str | None = None
        self._closed = False
        self._thread = threading.Thread(target=self._run, name="aztask-output", daemon=True)

    def write(self, text: str) -> None:
        """Write `text` as soon as the text before it is written; returns at once."""
        with self._changed:
            self._text = text
            self._changed.notify()
        if not self._thread.ident:
            self._thread.start()

    def close(self, seconds: float = 1.0) -> None:
        """Wait until the last text is written, for `seconds` at most."""
        with self._changed:
            self._closed = True
            self._changed.notify()
        if self._thread.ident:
            self._thread.join(seconds)

    def _run(self) -> None:
        while (text := self._next()) is not None:
            data = memoryview(text.encode("utf-8", "replace"))
            try:
                while data:
                    # not through sys.stdout: its lock would be held when the interpreter ends
                    data = data[os.write(self._descriptor, data) :]
            except OSError:  # the reader has gone
                return

    def _next(self) -> str | None:
        with self._changed:
            self._changed.wait_for(lambda: self._text is not None or self._closed)
            text, self._text = self._text, None
            return text
