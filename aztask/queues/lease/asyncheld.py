"""One message under a lease, for coroutines.

Rules
1. Everything that waits for the broker runs on one thread of the lease's own, in the order of the
   calls. So the event loop is never blocked, and other waiting coroutines take no thread from it.
2. A cancellation is never lost. While the block is entered or left, it is raised only after that
   has ended, so nothing is held afterwards and the message is back in its queue.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from functools import partial
from types import TracebackType
from typing import Any, Self, TypeVar

from aztask.errors import AztaskError
from aztask.queues.delivery import Delivery, Position
from aztask.queues.lease.held import HeldLease

Answer = TypeVar("Answer")


class AsyncHeldLease:
    """One message under a lease, held by an ``async with`` block; see `App.areceive`.

    ::

        async with app.areceive("orders") as lease:
            await handle(lease.body)
            await lease.complete()

    It behaves as `HeldLease` does: the lease is renewed inside the block, and a message that is not
    settled is abandoned at its end.

    If the task is cancelled inside the block, the message is given back and then CancelledError is
    raised. If it is cancelled while a settlement waits for the broker, the settlement may still
    take effect. If it is cancelled while it waits for a message, CancelledError comes up to a
    second later, and a message that arrived by then is released.
    """

    def __init__(self, receive: Callable[[threading.Event], HeldLease]) -> None:
        """Called by `App.areceive`. receive: makes the lease; the event ends its wait."""
        self._receive = receive
        self._stop = threading.Event()
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="aztask-areceive")
        self._lease: HeldLease | None = None

    @property
    def delivery(self) -> Delivery:
        """The delivery: envelope, position, delivery count and deadline."""
        return self._held().delivery

    @property
    def body(self) -> bytes:
        """The message's body as bytes, not decoded."""
        return self._held().body

    @property
    def lost(self) -> bool:
        """True if the lease has ended, so that another receiver may have the message."""
        return self._held().lost

    @property
    def remaining_seconds(self) -> float:
        """Seconds until the lease ends unless it is renewed; 0.0 once it has ended."""
        return self._held().remaining_seconds

    def ensure(self) -> None:
        """Return while the lease is held; raise LeaseLost once it is not. Asks no server.

        This is a fence in time, not a transaction: see `TaskLease.ensure`.
        """
        self._held().ensure()

    async def extend(self, seconds: float) -> None:
        """Hold the lease for at least `seconds` from now, as `HeldLease.extend` does."""
        await self._run(partial(self._held().extend, seconds))

    async def update(self, body: bytes, *, headers: Mapping[str, Any] | None = None) -> None:
        """Replace the message's content in place, as `HeldLease.update` does."""
        await self._run(partial(self._held().update, body, headers=headers))

    async def complete(self) -> None:
        """Remove the message: its work is done. Raises what `HeldLease.complete` raises."""
        await self._run(self._held().complete)

    async def abandon(self) -> None:
        """Make the message available again at once. Raises what `complete` raises."""
        await self._run(self._held().abandon)

    async def release(self) -> None:
        """Give the message back without counting the delivery. Raises what `complete` raises."""
        await self._run(self._held().release)

    async def dead_letter(self, reason: str, description: str = "") -> None:
        """Move the message to the dead letters. Raises what `complete` raises."""
        await self._run(partial(self._held().dead_letter, reason, description))

    async def resubmit(
        self,
        delay: float | timedelta = 0.0,
        *,
        body: bytes | None = None,
        headers: Mapping[str, Any] | None = None,
    ) -> None:
        """Send the message again after `delay` seconds, as `HeldLease.resubmit` does."""
        await self._run(partial(self._held().resubmit, delay, body=body, headers=headers))

    async def defer(self) -> Position:
        """Set the message aside and return its position, as `HeldLease.defer` does."""
        return await self._run(self._held().defer)

    async def __aenter__(self) -> Self:
        """Wait for a message. Raises LookupError if none came."""
        entered = False
        try:
            await self._finish(self._enter)
            entered = True
        finally:
            if not entered:
                await self._leave_early()
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        try:
            await self._finish(partial(self._held().__exit__, kind, error, trace))
        finally:
            self._thread.shutdown(wait=False)

    def _enter(self) -> None:
        self._lease = self._receive(self._stop).__enter__()

    async def _leave_early(self) -> None:
        """Give back a message that came although its block was never entered."""
        try:
            if self._lease is not None:
                await self._finish(partial(_give_back, self._lease))
        finally:
            self._thread.shutdown(wait=False)

    def _held(self) -> HeldLease:
        if self._lease is None:
            raise RuntimeError("use it as a context manager: async with app.areceive(...) as lease")
        return self._lease

    async def _run(self, call: Callable[[], Answer]) -> Answer:
        """Run `call` on the lease's thread. A cancellation is raised at once; the call goes on."""
        return await asyncio.get_running_loop().run_in_executor(self._thread, call)

    async def _finish(self, call: Callable[[], Answer]) -> Answer:
        """Run `call` to its end, and only then raise a cancellation that came before it."""
        running = asyncio.get_running_loop().run_in_executor(self._thread, call)
        cancelled: asyncio.CancelledError | None = None
        while not running.done():
            try:
                await asyncio.wait([running])
            except asyncio.CancelledError as error:
                cancelled = error
                self._stop.set()
        if cancelled is not None:
            with contextlib.suppress(Exception):
                running.result()  # asyncio would log an error that was not read
            raise cancelled
        return running.result()


def _give_back(lease: HeldLease) -> None:
    """Release the message, whose work has not begun, and end the lease."""
    with contextlib.suppress(AztaskError):  # leaving the block tries once more, and logs
        lease.release()
    lease.__exit__(None, None, None)
