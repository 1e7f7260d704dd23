"""One SQLite file, shared by threads and processes of one machine.

Rules
1. There is one connection, used under one lock. A transaction belongs to the thread that opened it.
   Nested transactions of that thread join the outer one, and an error inside rolls back all of it.
2. Every writer first takes the write lock (BEGIN IMMEDIATE, or a single writing statement). So no
   transaction fails half-way because another process was faster: it waits at its start.
3. SQLite's errors are raised as aztask's errors (`aztask.queues.engine.filesystem`).
4. After a fork the child cannot use its parent's database, but it can open the same file again
   (`aztask.queues.engine.forking`). Every call of SQLite is made under the lock, or while a file is
   opened or closed, so that no fork happens beside it.
5. If the file is deleted or replaced while it is open, every use raises BrokerError. SQLite itself
   would go on reading and writing the deleted file, which no other process sees.
"""

from __future__ import annotations

import itertools
import random
import sqlite3
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from types import TracebackType
from typing import Any, Final, Literal, TypeAlias

from aztask.errors import BrokerError, ConfigurationError
from aztask.queues.engine.filesystem import (
    TRANSLATED,
    identity,
    prepare,
    refuse_strangers,
    translate,
)
from aztask.queues.engine.forking import FORKS, opening
from aztask.queues.engine.watch import Watch

Durability: TypeAlias = Literal["process", "full"]
"""What an accepted write survives: "process": process death; "full": also power loss (slower)."""

IN_MEMORY: Final = ":memory:"

_APPLICATION_ID: Final = 0x617A7471  # "aztq": marks the file as ours (sqlite.org/pragma.html)
_PAGE_BYTES: Final = 2048  # small messages change few bytes: half of SQLite's page is faster
# When pages of a tree move, a commit scans the whole page cache (SQLite 3.40,
# pcache1TruncateUnsafe). In memory the cache holds every page, so there should be few pages. With a
# million messages on pages of 2 KiB, a commit takes up to 4 ms; with these larger pages a send
# takes as long as in an empty database.
_MEMORY_PAGE_BYTES: Final = 8192
_CHECKPOINT_PAGES, _LOG_BYTES = 2000, 16 * 1024 * 1024  # the log file's size after a burst
_SQLITE: Final = (3, 35, 0)  # the first version with RETURNING (sqlite.org/lang_returning.html)
_CHECK_SECONDS: Final = 0.001
"""How long a file counts as the one that was opened before its path is checked again.

The check costs as much as a tenth of a send. What is sent within these seconds of a deletion is
lost with the file, like everything that was sent to it before.
"""
_execute = sqlite3.Connection.execute

_BUSY: Final = sqlite3.SQLITE_BUSY
_PRIMARY_CODE: Final = 0xFF  # the other bits are the extended code (sqlite.org/rescode.html)
_SHORTEST, _LONGEST = 0.0001, 0.001
_serial = itertools.count(1)

_FILE_STEPS: Final = (
    """
    CREATE TABLE file (id TEXT NOT NULL);
    INSERT INTO file VALUES (lower(hex(randomblob(16))));
    """,
)


class Database:
    """An open database file, or one in memory that ends with this object.

    path: a file, created with its directories if missing, or ``":memory:"``.
    durability: see `Durability`.
    busy_seconds: how long to wait for another process's transaction.
    group: the group that a new file is shared with; None: this user alone.
    ``key`` is equal for databases of the same file. Raises ConfigurationError if the path is
    not writable, on a network file system, or a file of another program.
    """

    def __init__(
        self,
        path: str,
        *,
        durability: Durability = "process",
        busy_seconds: float = 10.0,
        group: str | None = None,
    ) -> None:
        self._connection: sqlite3.Connection | None = None
        self._forked = False
        if durability not in ("process", "full"):
            raise ConfigurationError(f"durability is 'process' or 'full', not {durability!r}")
        self.path = IN_MEMORY if path == IN_MEMORY else prepare(path, group)
        self.key = f"{IN_MEMORY}{next(_serial)}" if path == IN_MEMORY else self.path
        self._lock = self.lock = threading.RLock()
        self._watch: Watch | None = None
        self._depth = 0  # of transactions; guarded by the lock, like the three that follow
        self._owner = 0
        self._doomed: BaseException | None = None
        self._at_end: list[Callable[[bool], None]] = []
        with opening() as forks:
            forks.claim(self.path)
            self._connection = _open(self.path, durability, busy_seconds, group)
            self._identity = None if self.path == IN_MEMORY else identity(self.path)
            self._checked = time.monotonic()
            forks.databases.add(self)

    def transaction(self) -> Transaction:
        """A block whose changes are committed together or not at all.

        Blocks nest. If an inner block fails, the outer one is rolled back as a whole, even if the
        error was caught in between; then the outer block raises BrokerError at its end.
        """
        return Transaction(self)

    def joined(self) -> Transaction | Statement:
        """As `transaction`; joins that of this thread, if it has one, at half the cost."""
        mine = self._owner == threading.get_ident()
        return Statement(self) if mine else Transaction(self)

    def statement(self) -> Statement:
        """One statement: its own transaction, or part of this thread's current transaction."""
        return Statement(self)

    def change(self, sql: str, values: Sequence[object]) -> int:
        """Run one writing statement, as in `statement`; returns how many rows it changed.

        Use it for statements that run once per message: a ``with`` block costs as much as a small
        statement.
        """
        connection = self._enter()
        try:
            return connection.execute(sql, values).rowcount
        except BaseException as error:
            self._failed(error)
            raise
        finally:
            self._lock.release()

    def _failed(self, error: BaseException) -> None:
        """Note that a statement failed, and so the transaction around it. Raises aztask's error."""
        if self._depth and self._doomed is None:
            self._doomed = error
        if isinstance(error, TRANSLATED):
            raise translate(error, self.path) from error

    def read(self) -> Statement:
        """One reading statement. Use `transaction` if several must see the same state."""
        return Statement(self)

    def at_end(self, callback: Callable[[bool], None]) -> None:
        """Call back after this thread's transaction: with True after a commit, else with False.

        Outside a transaction, the callback is called at once, with True.
        """
        if self._owner == threading.get_ident():
            self._at_end.append(callback)
        else:
            callback(True)

    def changes(self) -> int:
        """A number that changes with every write of any process; cheap to read.

        PRAGMA data_version rises with commits of other connections, total_changes with our writes.
        """
        with Statement(self) as connection:
            (version,) = connection.execute("PRAGMA data_version").fetchone()
            return int(version) + connection.total_changes

    def others_changes(self) -> int:
        """A number that changes with every write of any other process."""
        with Statement(self) as connection:
            return int(connection.execute("PRAGMA data_version").fetchone()[0])

    @property
    def watch(self) -> Watch:
        """The watch that reports every write to the file, by any process."""
        if self._watch is None:
            with self._lock:
                log = None if self.path == IN_MEMORY else f"{self.path}-wal"
                self._watch = self._watch or Watch(log)
        return self._watch

    def migrate(self, component: str, steps: Sequence[str]) -> None:
        """Migrate the tables of `component` to version ``len(steps)``. A step runs once per file.

        A step is one or more SQL statements. Released steps are never changed; new ones are added
        behind them. Raises ConfigurationError if a newer release has run more steps.
        """
        with self.transaction() as connection:
            connection.execute(
                "CREATE TABLE IF NOT EXISTS components "
                "(component TEXT PRIMARY KEY, version INTEGER NOT NULL) WITHOUT ROWID"
            )
            row = connection.execute(
                "SELECT version FROM components WHERE component = ?", (component,)
            ).fetchone()
            version = row[0] if row else 0
            if version > len(steps):
                raise ConfigurationError(
                    f"{self.path} was written by a newer aztask ({component} {version}, this one "
                    f"knows {len(steps)}); upgrade aztask or choose another file"
                )
            for step in steps[version:]:
                for statement in _statements(step):
                    connection.execute(statement)
            if version < len(steps):
                connection.execute("REPLACE INTO components VALUES (?, ?)", (component, len(steps)))

    def file_id(self) -> str:
        """The id that the file has had since it was first asked for: 32 hexadecimal digits.

        It is kept in the file, so it survives a move; a copy has the same one.
        """
        self.migrate("file", _FILE_STEPS)
        with self.read() as connection:
            (found,) = connection.execute("SELECT id FROM file").fetchone()
        return str(found)

    @property
    def closed(self) -> bool:
        """Whether it can no longer be used: closed, or opened before this process was forked."""
        return self._connection is None

    def close(self) -> None:
        """Close the file. Does nothing in a forked child, or if it is closed already."""
        if self._connection is None:
            return
        with opening(), self._lock:
            connection, self._connection = self._connection, None
            if connection is not None:
                connection.close()
            if self._watch is not None:
                self._watch.close()

    def __del__(self) -> None:
        if self._connection is not None:
            FORKS.collect(self.path, self._connection)

    def __repr__(self) -> str:
        return f"Database({self.path!r})"

    def _enter(self) -> sqlite3.Connection:
        """Take the lock. In a forked child it may stay locked forever, so check that first.

        Whatever is raised from here to the end of a statement or a transaction, such as a time
        limit that ends a plain task in the middle of it, leaves the lock free and no transaction
        open: every other thread of the process needs both.
        """
        if self._connection is not None:
            self._lock.acquire()
            try:
                connection: sqlite3.Connection | None = self._connection
                if connection is not None:
                    if self._depth or self._is_in_place():
                        return connection
                    raise BrokerError(
                        f"{self.path} was deleted or replaced while it was open: nothing is read"
                        " or written; restart the processes that use it"
                    )
            except BaseException:
                self._lock.release()
                raise
            self._lock.release()
        if self._forked:
            raise BrokerError(
                f"{self.path} was opened before this process was forked; open it again here"
            )
        raise BrokerError(f"{self.path} is closed; open it again")

    def _is_in_place(self) -> bool:
        """Whether the path leads to the opened file, as seen at most `_CHECK_SECONDS` ago."""
        now = time.monotonic()
        if self._identity is None or now - self._checked < _CHECK_SECONDS:
            return True
        if identity(self.path) != self._identity:
            return False
        self._checked = now
        return True

    def _begin(self) -> sqlite3.Connection:
        connection = self._enter()
        try:
            if self._depth == 0:
                connection.execute("BEGIN IMMEDIATE")
                self._owner = threading.get_ident()
            self._depth += 1
        except BaseException as error:
            try:
                if self._depth == 0:
                    connection.rollback()
                    self._owner = 0
            finally:
                self._lock.release()
            if isinstance(error, sqlite3.Error):
                raise translate(error, self.path) from error
            raise
        return connection

    def _commit(self, error: BaseException | None) -> bool:
        """Commit the outermost transaction, unless part of it failed; returns whether it did.

        If the process dies before COMMIT has returned, the file holds all of it or nothing.
        """
        connection = self._connection
        if connection is None or error is not None or self._doomed is not None:
            return False
        try:
            if connection.in_transaction:
                connection.execute("COMMIT")
                return True
        except sqlite3.Error as failure:
            raise translate(failure, self.path) from failure
        return False

    def in_transaction(self) -> bool:
        """Whether a transaction is open, of whichever thread."""
        return self._depth > 0

    def disown(self) -> sqlite3.Connection | None:
        """In a forked child: give up the connection and return it; None if it was closed."""
        connection, self._connection = self._connection, None
        if connection is not None:
            self._forked = True
        return connection


class Statement:
    """The context manager of `Database.statement`: gives the connection, under the lock."""

    __slots__ = ("_database",)

    def __init__(self, database: Database) -> None:
        self._database = database

    def __enter__(self) -> sqlite3.Connection:
        return self._database._enter()

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        database = self._database
        try:
            if error is not None:
                database._failed(error)
        finally:
            database._lock.release()


class Transaction:
    """The context manager of `Database.transaction`: BEGIN IMMEDIATE and COMMIT or ROLLBACK."""

    __slots__ = ("_database",)

    def __init__(self, database: Database) -> None:
        self._database = database

    def __enter__(self) -> sqlite3.Connection:
        return self._database._begin()

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        database = self._database
        outermost, committed = database._depth == 1, False
        doomed, callbacks = database._doomed, database._at_end
        try:
            if outermost:
                committed = database._commit(error)
            elif error is not None and doomed is None:
                database._doomed = error
        finally:
            # Only what is written in C from here on, until the lock is free: see `Database._enter`.
            database._depth -= 1
            try:
                if outermost:
                    database._owner, database._doomed, database._at_end = 0, None, []
                    if not committed and database._connection is not None:
                        database._connection.rollback()
            finally:
                database._lock.release()
            for callback in callbacks if outermost else ():
                callback(committed)
        if isinstance(error, TRANSLATED):
            raise translate(error, database.path) from error
        if outermost and error is None and not committed:
            raise BrokerError(
                f"{database.path}: the transaction was rolled back because part of it failed: "
                f"{doomed}"
            ) from doomed


class PatientConnection(sqlite3.Connection):
    """A connection whose statements wait for the lock, up to `patience` seconds.

    Inside a transaction it does not wait: the transaction has the lock, or can never get it.

    Why not SQLite's busy handler: it sleeps longer and longer, up to a tenth of a second. Beside a
    process that writes without pause, one write in a hundred then waits for most of a second.
    Trying again about every millisecond costs little, and a write waits only a few milliseconds.
    """

    patience: float = 0.0

    def execute(self, sql: str, parameters: Any = (), /) -> sqlite3.Cursor:
        """Execute one statement; raises OperationalError (SQLITE_BUSY) after `patience`."""
        try:
            return _execute(self, sql, parameters)
        except sqlite3.OperationalError as error:
            if self.in_transaction or error.sqlite_errorcode & _PRIMARY_CODE != _BUSY:
                raise
        until = time.monotonic() + self.patience
        while True:
            time.sleep(random.uniform(_SHORTEST, _LONGEST))  # noqa: S311  # spreads load, guards nothing
            try:
                return _execute(self, sql, parameters)
            except sqlite3.OperationalError as error:
                busy = error.sqlite_errorcode & _PRIMARY_CODE == _BUSY
                if not busy or time.monotonic() > until:
                    raise


def _open(
    path: str, durability: Durability, busy_seconds: float, group: str | None
) -> sqlite3.Connection:
    if sqlite3.sqlite_version_info < _SQLITE:
        raise ConfigurationError(
            f"SQLite {sqlite3.sqlite_version} is too old for {path}: use a Python with "
            f"{'.'.join(map(str, _SQLITE))} or newer"
        )
    # No other process can lock a database in memory, so waiting is not needed.
    factory = sqlite3.Connection if path == IN_MEMORY else PatientConnection
    try:
        connection = sqlite3.connect(
            path,
            timeout=0.0,
            isolation_level=None,
            check_same_thread=False,
            factory=factory,
        )
    except sqlite3.Error as error:
        raise translate(error, path) from error
    if isinstance(connection, PatientConnection):
        connection.patience = busy_seconds
    try:
        _configure(connection, path, durability)
        if path != IN_MEMORY:
            refuse_strangers(path, group)
    except sqlite3.Error as error:
        connection.close()
        raise translate(error, path) from error
    except ConfigurationError:
        connection.close()
        raise
    return connection


def _configure(connection: sqlite3.Connection, path: str, durability: Durability) -> None:
    """Check that the file is ours, then set the pragmas (sqlite.org/pragma.html)."""
    # The order matters: another process may create the file now; it sets the id before the tables.
    (tables,) = connection.execute("SELECT count(*) FROM sqlite_schema").fetchone()
    (application,) = connection.execute("PRAGMA application_id").fetchone()
    if application != _APPLICATION_ID and (application or tables):
        raise ConfigurationError(
            f"{path} is an SQLite database of another program; choose another file"
        )
    if not application:
        size = _MEMORY_PAGE_BYTES if path == IN_MEMORY else _PAGE_BYTES
        connection.execute(f"PRAGMA page_size = {size}")
    connection.execute("PRAGMA journal_mode = WAL")
    connection.execute(f"PRAGMA synchronous = {'FULL' if durability == 'full' else 'NORMAL'}")
    connection.execute(f"PRAGMA wal_autocheckpoint = {_CHECKPOINT_PAGES}")
    connection.execute(f"PRAGMA journal_size_limit = {_LOG_BYTES}")
    # Otherwise every UPDATE of several rows creates and removes a file for its undo log.
    connection.execute("PRAGMA temp_store = MEMORY")
    connection.execute("PRAGMA cache_size = -16000")
    connection.execute(
        "PRAGMA secure_delete = OFF"
    )  # Debian's build switches it on, which writes more
    if not application:
        connection.execute(f"PRAGMA application_id = {_APPLICATION_ID}")


def _statements(script: str) -> Iterator[str]:
    """Split `script` into its statements, because `executescript` would commit in between."""
    statement = ""
    for line in script.splitlines(keepends=True):
        statement += line
        if sqlite3.complete_statement(statement):
            yield statement
            statement = ""
    if statement.strip():
        yield statement
