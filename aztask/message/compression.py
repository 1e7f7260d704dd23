"""Kombu's ``compression`` header: bodies that other producers compressed, read within limits.

Rules: aztask's own messages are never compressed. Only the Kombu transport compresses what the
service refuses as too large (`aztask.celery.transport.routing.fitting`). Of other producers, the
zlib, bzip2 and xz streams of Kombu and Celery are read, never more than
``MessageLimits.body_bytes`` of output. Every other method is refused.
"""

from __future__ import annotations

import zlib
from bz2 import BZ2Decompressor
from collections.abc import Callable
from lzma import FORMAT_AUTO, LZMADecompressor, LZMAError
from typing import Any, Final

from aztask.errors import ContentRefused, DecodeError
from aztask.message.bounds import MessageLimits, check_size

ZLIB: Final = "application/x-gzip"
"""Kombu's "gzip", which is a zlib stream."""

_DECOMPRESSORS: dict[str, Callable[[], Any]] = {
    ZLIB: zlib.decompressobj,
    "application/x-bz2": BZ2Decompressor,
    "application/x-lzma": lambda: LZMADecompressor(FORMAT_AUTO, memlimit=64 * 1024 * 1024),
}


def decompress(data: bytes, kind: object, limits: MessageLimits) -> bytes:
    """Decompress a body whose ``compression`` header is `kind`, up to ``limits.body_bytes``.

    Raises ContentRefused (an unknown method, or a decompression bomb) and DecodeError.
    """
    make = _DECOMPRESSORS.get(kind) if isinstance(kind, str) else None
    if make is None:
        raise ContentRefused(
            f"the body is compressed as {str(kind)[:40]!r}, which is not accepted;"
            f" send it plain or as one of {', '.join(_DECOMPRESSORS)}"
        )
    stream = make()
    try:
        plain: bytes = stream.decompress(data, limits.body_bytes + 1)
    except (zlib.error, OSError, EOFError, ValueError, LZMAError) as error:
        raise DecodeError(f"the compressed body is damaged: {error}") from None
    check_size(len(plain), limits)
    if not stream.eof:
        raise DecodeError("the compressed body ends too early")
    if stream.unused_data:
        raise DecodeError(f"{len(stream.unused_data)} bytes follow the end of the compressed body")
    return plain
