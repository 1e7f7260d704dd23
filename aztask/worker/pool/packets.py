"""Packets between the worker and its pool processes, over Unix sockets that keep boundaries; and
what a task gets of them when it waits for an answer (`Answers`).

Rules
1. One packet is one msgpack value. Packets arrive complete, in order, each at exactly one reader.
2. The worker keeps a duplicate of the pool process's reading end. So it can take back unread
   packets, atomically, even from a process that hangs or has died.
3. A value of more than `PACKET_BYTES` travels in a file in memory, whose descriptor the packet
   carries. The kernel frees the file when no process can reach it, whichever process is killed.
"""

from __future__ import annotations

import array
import errno
import os
import socket
import threading
from typing import Any, Final, Protocol

import msgpack

from aztask.context import TaskLease
from aztask.errors import CapabilityError, LeaseLost, MessageTooLarge

PACKET_BYTES = 60_000
BUFFER_BYTES = 1 << 20
_IN_FILE = b"\xc1"  # a byte that msgpack never uses
_DESCRIPTOR_BYTES = array.array("i").itemsize
# Other systems than Linux can import this, see `aztask.worker.platform`.
_ATTACHED_BYTES = socket.CMSG_SPACE(_DESCRIPTOR_BYTES) if hasattr(socket, "CMSG_SPACE") else 0
# of an enumeration: looked up and or-ed for every packet
_CLOEXEC = int(getattr(socket, "MSG_CMSG_CLOEXEC", 0))


_NOW: Final = int(getattr(socket, "MSG_DONTWAIT", 0))


class PacketsOut(Protocol):
    """An end to which values are written: `Packets`, and `streams.StreamPackets`."""

    def send(self, value: Any, *, wait: bool = True) -> bool:
        """Send one value; False if that is impossible without waiting. Raises OSError."""


class PacketsIn(Protocol):
    """An end from which values are read: `Packets`, and the two of `aztask.worker.pool.streams`."""

    @property
    def buffered(self) -> bool:
        """Whether a value may have been read that no `receive` has returned: do not wait then."""

    def fileno(self) -> int:
        """The descriptor to wait for."""

    def receive(self, *, wait: bool = True) -> Any:
        """The next value; None if the peer has closed. Raises BlockingIOError, OSError."""


def socket_pair() -> tuple[socket.socket, socket.socket]:
    """Two connected ends that keep message boundaries and notice when the peer closes."""
    left, right = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    for end in (left, right):
        end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, BUFFER_BYTES)
    return left, right


class Packets:
    """One end of a socket, for values. One thread at a time may receive; any may send.

    What a `receive` that raises has taken is kept for the next one, or its delivery would seem to
    run without end. With an OSError the value itself is lost, and the reader ends.
    """

    def __init__(self, end: socket.socket) -> None:
        self.socket = end
        self._buffer = bytearray(PACKET_BYTES)
        self._buffers = [self._buffer]
        self._view = memoryview(self._buffer)
        self._taken: tuple[int, list[tuple[int, int, bytes]]] | None = None

    @property
    def buffered(self) -> bool:
        """Whether a value was taken that no `receive` has returned."""
        return self._taken is not None

    def fileno(self) -> int:
        """The descriptor of the socket, for selectors."""
        return self.socket.fileno()

    def send(self, value: Any, *, wait: bool = True) -> bool:
        """Send one value; False if the socket is full and `wait` or its mode forbid to wait.

        Raises OSError if the peer has closed its end. wait: True for large values.
        """
        packed = msgpack.packb(value, use_bin_type=True, unicode_errors="surrogatepass")
        try:
            if len(packed) > PACKET_BYTES:
                self._send_file(packed)
            else:
                self.socket.send(packed, 0 if wait else _NOW)
        except BlockingIOError:
            return False
        return True

    def receive(self, *, wait: bool = True) -> Any:
        """Receive the next value; None if the peer has closed. Raises BlockingIOError.

        None itself is never sent. wait: False does not wait, even on a blocking socket; duplicates
        of a descriptor share that mode.
        """
        if self._taken is None:
            self._taken = self.socket.recvmsg_into(
                self._buffers, _ATTACHED_BYTES, _CLOEXEC if wait else _CLOEXEC | _NOW
            )[:2]
        size, attached = self._taken
        if size == 0:
            return None
        packed: bytes | memoryview = self._view[:size]
        if self._buffer[0] == _IN_FILE[0]:
            try:
                packed = _read_file(attached)
            except OSError:
                self._taken = None
                raise
        value = msgpack.unpackb(
            packed, raw=False, strict_map_key=False, unicode_errors="surrogatepass"
        )
        self._taken = None
        return value

    def close(self) -> None:
        """Close this end; the peer notices."""
        self.socket.close()

    def _send_file(self, packed: bytes) -> None:
        """Raises BlockingIOError if the socket is full or too many descriptors are in transit."""
        with os.fdopen(os.memfd_create("aztask-value"), "wb", buffering=0) as file:
            left = memoryview(packed)
            while left:
                left = left[file.write(left) :]
            try:
                socket.send_fds(self.socket, [_IN_FILE], [file.fileno()])
            except OSError as error:
                if error.errno == errno.ETOOMANYREFS:
                    raise BlockingIOError from error
                raise


def _read_file(attached: list[tuple[int, int, bytes]]) -> bytes:
    """Read and close the file whose descriptor came with a packet."""
    descriptors = array.array("i")
    for _, _, data in attached:
        descriptors.frombytes(data[: len(data) - len(data) % _DESCRIPTOR_BYTES])
    if not descriptors:  # the kernel drops it if the process has too many open files
        raise OSError(errno.EMFILE, "too many open files to read a large value")
    with os.fdopen(descriptors[0], "rb", buffering=0) as file:
        file.seek(0)
        return file.readall()


# -- Answers that tasks wait for -------------------------------------------------------------------
#
# Running tasks make requests, and the worker answers. An answer's error is "" (done), `LOST`,
# `TOO_LARGE` followed by a text, or any other text that says why the request failed.


LOST = "lost"
"""The lease is lost."""

TOO_LARGE = "too large: "
"""Prefix of the reason: the value is larger than the broker takes."""


class Answers:
    """One answer per delivery at a time, because a task waits for one request at a time."""

    def __init__(self) -> None:
        self._condition = threading.Condition()
        self._answers: dict[int, tuple[str, Any]] = {}

    def answer(self, number: int, error: str, value: Any = None) -> None:
        """Store the answer and wake the task. error: see above; value: what was asked for."""
        with self._condition:
            self._answers[number] = (error, value)
            self._condition.notify_all()

    def wait(self, number: int, lease: TaskLease) -> Any:
        """Wait for the answer and return its value.

        Raises LeaseLost if the lease ends first, MessageTooLarge, CapabilityError.
        """
        with self._condition:
            while number not in self._answers:
                lease.ensure()
                self._condition.wait(min(1.0, lease.remaining_seconds))
            error, value = self._answers.pop(number)
        if error == LOST:
            raise LeaseLost
        if error.startswith(TOO_LARGE):
            raise MessageTooLarge(error.removeprefix(TOO_LARGE))
        if error:
            raise CapabilityError(error)
        return value
