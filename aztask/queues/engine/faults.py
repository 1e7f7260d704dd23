"""Translates SQLite's errors into aztask's errors; no other module does.

The names are SQLite's result codes (sqlite.org/rescode.html). A write that finds no room changes
nothing: SQLite rolls back the whole transaction.
"""

from __future__ import annotations

import sqlite3
from typing import Final, TypeAlias

from aztask.errors import (
    AztaskError,
    BrokerError,
    BrokerUnavailable,
    ConfigurationError,
    EncodeError,
    MessageTooLarge,
    QueueFull,
)

TRANSLATED = (sqlite3.Error, UnicodeEncodeError, OverflowError)
"""The errors for `translate`: SQLite's, and Python's for values that SQLite cannot hold."""

_Advice: TypeAlias = tuple[tuple[str, ...], type[AztaskError], str]

_MEANINGS: Final[tuple[_Advice, ...]] = (
    (
        (
            "SQLITE_FULL",
            "SQLITE_IOERR_WRITE",
            "SQLITE_IOERR_SHM",
            "SQLITE_IOERR_TRUNCATE",
            "SQLITE_IOERR_FSYNC",
        ),
        QueueFull,
        "no room to write {path} ({error}): nothing was stored; free some disk space",
    ),
    (
        ("SQLITE_BUSY", "SQLITE_LOCKED", "SQLITE_PROTOCOL"),
        BrokerUnavailable,
        "{path} was locked by another process for too long; try again, and find the process "
        "that keeps a transaction open",
    ),
    (
        ("SQLITE_NOTADB", "SQLITE_CORRUPT"),
        ConfigurationError,
        "{path} is not an aztask queue file, or is damaged ({error}); choose another file, or move "
        "this one to another place",
    ),
    (
        ("SQLITE_CANTOPEN", "SQLITE_READONLY", "SQLITE_PERM", "SQLITE_AUTH"),
        ConfigurationError,
        "{path} cannot be opened for writing ({error}); check the file, its directory and their "
        "permissions",
    ),
    (
        ("InterfaceError", "SQLITE_MISMATCH"),
        EncodeError,
        "{path} cannot hold a value of that type ({error})",
    ),
    (
        ("SQLITE_TOOBIG",),
        MessageTooLarge,
        "{path} cannot hold that many bytes in one message ({error}); store the data elsewhere",
    ),
    (
        ("SQLITE_IOERR",),
        BrokerUnavailable,
        "{path} cannot be read or written ({error}, {code}); check the disk",
    ),
    (("",), BrokerError, "{path}: {error} ({code})"),
)
"""Prefixes of result codes, the error class, and its text. The first match wins."""


def translate(error: BaseException, path: str) -> AztaskError:
    """The aztask error for `error`, which was raised while using the file `path`."""
    if isinstance(error, (UnicodeEncodeError, OverflowError)):
        return EncodeError(f"this cannot be stored: {error}; send plain text and 64-bit numbers")
    code = getattr(error, "sqlite_errorname", None) or type(error).__name__
    kind, advice = next((k, a) for begins, k, a in _MEANINGS if code.startswith(begins))
    return kind(advice.format(path=path, error=error, code=code))
