"""Values between a worker and its pool processes over plain streams, for the portable shell.

`aztask.worker.pool.packets` needs sockets that keep boundaries and can carry a descriptor, which
only Linux has. These need a connected pair of stream sockets and a private folder.

Rules
1. A value is a frame: its length, then its msgpack. A value of more than `PACKET_BYTES` is a file
   in the link's folder, and the frame names it. Its reader removes it; so does the end of the link.
2. Sockets never block. Who may wait does so with `select`, which every system has.
3. A task's thread may be interrupted between any two bytecodes, also while it sends. So how much of
   a frame has been sent is noted in one call of C, and the next sender goes on from there.
4. A delivery may be run by who reads its *ticket*, one byte on a stream of its own. The worker
   keeps a duplicate of the ticket's reading end: to take deliveries back it reads tickets as well.
   A byte arrives at exactly one reader, whether the process lives, hangs or has died.
5. What a `receive` that raises has taken is kept for the next one: an error between a ticket and
   its frame would put the process one delivery behind for good, and the last one would seem to run.
6. The frames of deliveries that were taken back are still on their way. Each frame carries an
   epoch, and each ticket says which: the process skips frames of other epochs.
"""

from __future__ import annotations

import os
import select
import socket
import struct
import threading
from collections import deque
from contextlib import suppress
from itertools import count
from pathlib import Path
from typing import Any, Final

import msgpack

from aztask.worker.platform import connected_pair
from aztask.worker.pool.packets import PACKET_BYTES

CHUNK: Final = 1 << 16
LONGEST: Final = 1 << 30
BUFFER_BYTES: Final = 1 << 20
EPOCHS: Final = 256
"""How many epochs a ticket of one byte can tell apart."""

_LENGTH: Final = struct.Struct("<I")
_IN_FILE: Final = 0xC1  # a byte that msgpack never uses


def stream_pair() -> tuple[socket.socket, socket.socket]:
    """Two connected ends that do not block; on Windows they are connected over the loopback."""
    pair = connected_pair()
    for end in pair:
        end.setblocking(False)
        end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, BUFFER_BYTES)
        if end.family != getattr(socket, "AF_UNIX", None):
            end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return pair


class StreamPackets:
    """One end of a stream, for values both ways. One thread may receive; any may send."""

    def __init__(self, end: socket.socket, folder: Path, *, waits: bool) -> None:
        """folder: for large values. waits: whether `send` may wait until there is room."""
        self.socket = end
        self._folder = folder
        self._waits = waits
        self._received = bytearray()
        self._at = 0
        self._lock = threading.Lock()
        self._frames: deque[tuple[memoryview, list[int]]] = deque()
        self._numbers = count()

    @property
    def buffered(self) -> bool:
        """Whether bytes were received that no `receive` has returned."""
        return self._at < len(self._received)

    def fileno(self) -> int:
        """The descriptor of the socket, for selectors."""
        return self.socket.fileno()

    def send(self, value: Any, *, wait: bool = True) -> bool:
        """Send one value; False if there is no room and this may not wait.

        Raises OSError if the peer has closed its end.
        """
        packed = msgpack.packb(value, use_bin_type=True, unicode_errors="surrogatepass")
        if len(packed) > PACKET_BYTES:
            packed = self._in_file(packed)
        frame = memoryview(_LENGTH.pack(len(packed)) + packed)
        if wait and self._waits:
            self._frames.append((frame, []))
            with self._lock:
                return self._pass_on(wait=True)
        if not self._lock.acquire(blocking=False):
            return False
        try:
            if not self._pass_on(wait=False):
                return False
            self._frames.append((frame, []))
            self._pass_on(wait=False)  # what is left of it goes first at the next call
            return True
        finally:
            self._lock.release()

    def flush(self) -> bool:
        """Send what `send` could not, without waiting; whether all has been sent."""
        if not self._frames:
            return True
        with self._lock:
            return self._pass_on(wait=False)

    def receive(self, *, wait: bool = True) -> Any:
        """Receive the next value; None if the peer has closed. Raises BlockingIOError, OSError."""
        while True:
            if (found := self._next()) is not None:
                packed, end = found
                value = msgpack.unpackb(
                    packed, raw=False, strict_map_key=False, unicode_errors="surrogatepass"
                )
                self._at = end  # not before: rule 5
                return value
            try:
                chunk = self.socket.recv(CHUNK)
            except BlockingIOError:
                if not wait:
                    raise
                select.select([self.socket], [], [])
                continue
            if not chunk:
                return None
            self._received += chunk

    def close(self) -> None:
        """Close this end; the peer notices."""
        self.socket.close()

    def _pass_on(self, *, wait: bool) -> bool:
        """Send the frames in their order; whether all were sent. The caller has the lock."""
        while self._frames:
            frame, sent = self._frames[0]
            left = frame[sum(sent) :]
            if not left:
                self._frames.popleft()
                continue
            try:
                # One call of C: no interrupt can come between the sending and the note of it.
                sent.extend(map(self.socket.send, (left,)))
            except BlockingIOError:
                if not wait:
                    return False
                select.select([], [self.socket], [])
        return True

    def _next(self) -> tuple[bytes, int] | None:
        """The next whole frame that has been received, and where the one behind it begins."""
        if self._at == len(self._received):
            self._received, self._at = bytearray(), 0
        elif self._at > CHUNK:
            del self._received[: self._at]
            self._at = 0
        begin = self._at + _LENGTH.size
        if len(self._received) < begin:
            return None
        size = _LENGTH.unpack_from(self._received, self._at)[0]
        if not 0 < size <= LONGEST:
            raise ValueError(f"a frame of {size} bytes: something else has written to this stream")
        end = begin + size
        if len(self._received) < end:
            return None
        packed = bytes(memoryview(self._received)[begin:end])
        return (self._read_file(packed) if packed[0] == _IN_FILE else packed), end

    def _in_file(self, packed: bytes) -> bytes:
        """Write a large value; returns what the frame says instead of it."""
        name = f"value-{os.getpid()}-{self.socket.fileno()}-{next(self._numbers)}"
        try:
            (self._folder / name).write_bytes(packed)
        except OSError:
            # The disk is full. The stream takes it too, only slowly: the worker's end has to wait.
            (self._folder / name).unlink(missing_ok=True)
            return packed
        return bytes([_IN_FILE]) + name.encode()

    def _read_file(self, packed: bytes) -> bytes:
        path = self._folder / packed[1:].decode()
        data = path.read_bytes()
        path.unlink()
        return data


class TicketInbox:
    """The process's end for deliveries (rules 4 to 6). One thread at a time may receive."""

    def __init__(self, tickets: socket.socket, packets: StreamPackets) -> None:
        self._tickets = tickets
        self._packets = packets
        self._taken: list[bytes] = []  # a ticket whose delivery no `receive` has returned

    @property
    def buffered(self) -> bool:
        """Whether a ticket was read and its delivery was not returned (rule 5)."""
        return bool(self._taken)

    def fileno(self) -> int:
        """Readable while there is a delivery to take."""
        return self._tickets.fileno()

    def receive(self, *, wait: bool = True) -> Any:
        """Take the next delivery; None if the worker has ended. Raises BlockingIOError, OSError."""
        while not self._taken:
            try:
                self._taken.append(self._tickets.recv(1))
            except BlockingIOError:
                if not wait:
                    raise
                select.select([self._tickets], [], [])
        while ticket := self._taken[0]:
            # The frame was sent before its ticket, so this does not wait for long.
            if (found := self._packets.receive()) is None:
                break
            epoch, packet = found
            if epoch % EPOCHS == ticket[0]:
                self._taken.clear()
                return packet
        return None


class TicketOutbox:
    """The worker's end for deliveries (rules 4 and 6). One thread uses it."""

    def __init__(
        self, tickets: socket.socket, duplicate: socket.socket, packets: StreamPackets, most: int
    ) -> None:
        """duplicate: of the process's end of the tickets. most: deliveries it holds at once."""
        self._tickets = tickets
        self._duplicate = duplicate
        self._packets = packets
        self._unticketed = bytearray()
        self._sent: deque[int | None] = deque(maxlen=most)
        self._epoch = 0
        self._sent_in_epoch = 0
        self._passed = 0  # the process has read all frames of earlier epochs

    def send(self, packet: list[Any]) -> bool:
        """Put a delivery, or [] to retire a slot; False if there is no room. Raises OSError."""
        if not self.flush() or self._epoch - self._passed >= EPOCHS - 1:
            return False
        if not self._packets.send([self._epoch, packet], wait=False):
            return False
        self._sent.append(packet[0] if packet else None)
        self._sent_in_epoch += 1
        self._unticketed.append(self._epoch % EPOCHS)
        self.flush()
        return True

    def flush(self) -> bool:
        """Pass on what is left, a ticket never before its frame; whether all has been passed on."""
        if self._packets.flush() and self._unticketed:
            with suppress(BlockingIOError):
                del self._unticketed[: self._tickets.send(self._unticketed)]
        return not self._unticketed

    def unread(self) -> list[int]:
        """Take back what the process has not begun to read: the numbers of the deliveries.

        Requests to retire slots are taken back with them, and put again.
        """
        taken = len(self._unticketed)
        self._unticketed.clear()
        with suppress(BlockingIOError):
            while tickets := self._duplicate.recv(CHUNK):
                taken += len(tickets)
        if not taken:
            return []
        if taken < self._sent_in_epoch:
            self._passed = self._epoch
        self._epoch += 1
        self._sent_in_epoch = 0
        found = [self._sent.pop() for _ in range(min(taken, len(self._sent)))]
        with suppress(OSError):  # it has ended, and its slots with it
            for number in found:
                if number is None:
                    self.send([])
        return [number for number in reversed(found) if number is not None]

    def close(self) -> None:
        """Close both ends of the tickets."""
        self._tickets.close()
        self._duplicate.close()
