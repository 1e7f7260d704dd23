"""Packets between the worker and its pool processes, over Unix sockets that keep boundaries.

Rules
1. One packet is one msgpack value. Packets arrive whole, in order, each at exactly one reader.
2. The worker keeps a duplicate of the pool process's reading end: it can take back what was not
   read, atomically, even from a process that hangs or died.
3. A value over `SPILL_BYTES` travels in a file of the worker's private folder; the packet holds its
   name, and whoever reads the packet reads and removes the file. The folder is made for the first
   such value, and removed by the worker: one that had any and is killed leaves it behind.
"""

from __future__ import annotations

import os
import secrets
import socket
import tempfile
from contextlib import suppress
from pathlib import Path
from typing import Any

import msgpack

SPILL_BYTES = 60_000
BUFFER_BYTES = 1 << 20
_SPILLED = b"\xc1"  # a byte that msgpack never uses: the rest of the packet is a file name


def socket_pair() -> tuple[socket.socket, socket.socket]:
    """Two connected ends. Message boundaries are kept and a closed peer is noticed."""
    left, right = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    for end in (left, right):
        end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, BUFFER_BYTES)
    return left, right


def spill_folder() -> str:
    """A name for a worker's private folder, which nobody has guessed and made before."""
    return str(Path(tempfile.gettempdir()) / f"aztask-{secrets.token_hex(16)}")


class Packets:
    """One end of a socket, as values. Reading is for one thread at a time; any may send."""

    def __init__(self, end: socket.socket, spill_folder: str) -> None:
        self.socket = end
        self._folder = spill_folder
        self._buffer = bytearray(SPILL_BYTES + 1024)
        self._view = memoryview(self._buffer)

    def fileno(self) -> int:
        """The socket's descriptor."""
        return self.socket.fileno()

    def send(self, value: Any) -> bool:
        """Send one value; False when the socket does not block and is full.

        Raises OSError when the peer is gone.
        """
        packed = msgpack.packb(value, use_bin_type=True, unicode_errors="surrogatepass")
        if len(packed) > SPILL_BYTES:
            packed = self._spill(packed)
        try:
            self.socket.send(packed)
        except BlockingIOError:
            if packed[:1] == _SPILLED:
                Path(os.fsdecode(packed[1:])).unlink()
            return False
        return True

    def receive(self, flags: int = 0) -> Any:
        """The next value; None at the end (nothing sends None). Raises BlockingIOError.

        flags: of recv(2); ``socket.MSG_DONTWAIT`` does not wait, whatever the socket's mode, which
        duplicates of a descriptor share.
        """
        size = self.socket.recv_into(self._buffer, 0, flags)
        if size == 0:
            return None
        packed: bytes | memoryview = self._view[:size]
        if self._buffer[0] == _SPILLED[0]:
            name = Path(os.fsdecode(bytes(packed[1:])))
            packed = name.read_bytes()
            name.unlink()
        return msgpack.unpackb(
            packed, raw=False, strict_map_key=False, unicode_errors="surrogatepass"
        )

    def close(self) -> None:
        """Close this end."""
        self.socket.close()

    def _spill(self, packed: bytes) -> bytes:
        """Write to a file; a process that dies before sending leaves it to the clean-up."""
        try:
            descriptor, name = tempfile.mkstemp(dir=self._folder)
        except FileNotFoundError:
            with suppress(FileExistsError):  # another process was first
                Path(self._folder).mkdir(mode=0o700)
            descriptor, name = tempfile.mkstemp(dir=self._folder)
        with os.fdopen(descriptor, "wb") as file:
            file.write(packed)
        return _SPILLED + os.fsencode(name)
