"""An emulator on its own thread, for tests and scripts that are not asynchronous."""

from __future__ import annotations

import asyncio
import threading
from types import TracebackType

from aztask.emulator.emulator import Emulator
from aztask.emulator.options import Options
from aztask.errors import AztaskError, BrokerUnavailable
from aztask.support.clock import Clock

START_SECONDS = 30.0


class BackgroundEmulator:
    """A context manager that starts an emulator on entry and stops it on exit."""

    def __init__(self, options: Options, *, clock: Clock | None = None) -> None:
        self.emulator = Emulator(options, clock=clock)
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._run, name="aztask-emulator", daemon=True)
        self._started = threading.Event()
        self._failure: BaseException | None = None

    def __enter__(self) -> BackgroundEmulator:
        """Start the emulator and wait until it listens.

        Raises OSError for a port in use, AztaskError, and BrokerUnavailable after `START_SECONDS`.
        """
        self._thread.start()
        if not self._started.wait(START_SECONDS):
            raise BrokerUnavailable(f"the emulator did not start within {START_SECONDS:g} s")
        if self._failure is not None:
            self._thread.join()
            raise self._failure
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if self._thread.is_alive():
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join()

    def _run(self) -> None:
        loop = self._loop
        asyncio.set_event_loop(loop)
        try:
            loop.run_until_complete(self.emulator.start())
        except (AztaskError, OSError) as error:
            self._failure = error
        self._started.set()
        if self._failure is None:
            loop.run_forever()
        loop.run_until_complete(self.emulator.stop())
        loop.run_until_complete(loop.shutdown_asyncgens())
        loop.close()
