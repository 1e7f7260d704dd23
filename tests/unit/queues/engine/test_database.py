"""The database under the engine: transactions, errors, forks, and places it refuses."""

from __future__ import annotations

import gc
import os
import sqlite3
import sys
import threading
import time
from contextlib import suppress
from pathlib import Path

import pytest

import aztask
from aztask.errors import BrokerError, ConfigurationError, EncodeError, MessageTooLarge
from aztask.queues.engine import Database, Engine, NewMessage
from aztask.queues.engine import database as database_module
from aztask.queues.engine.database import PatientConnection

PACKAGE = str(Path(aztask.__file__).parent)
TABLE = "CREATE TABLE things (name TEXT NOT NULL);"


@pytest.fixture
def path(tmp_path):
    return str(tmp_path / "deep" / "er" / "queues.db")


@pytest.fixture
def database(path):
    database = Database(path)
    database.migrate("test", [TABLE])
    yield database
    database.close()


def add(database, name):
    with database.statement() as connection:
        connection.execute("INSERT INTO things VALUES (?)", (name,))


def names(database):
    with database.read() as connection:
        return [name for (name,) in connection.execute("SELECT name FROM things ORDER BY rowid")]


def test_a_transaction_is_all_or_nothing(database):
    with database.transaction():
        add(database, "a")
        add(database, "b")
    with pytest.raises(ZeroDivisionError), database.transaction():
        add(database, "c")
        1 / 0  # noqa: B018 - the error is the point
    assert names(database) == ["a", "b"]


def test_a_nested_transaction_joins_the_outer_one(database):
    with pytest.raises(ZeroDivisionError), database.transaction():
        with database.transaction():
            add(database, "inner")
        1 / 0  # noqa: B018
    assert names(database) == []


def test_an_error_inside_takes_back_the_whole_even_when_it_was_caught(database):
    with pytest.raises(BrokerError, match="rolled back"), database.transaction():
        add(database, "outer")
        with pytest.raises(BrokerError), database.transaction() as connection:
            connection.execute("INSERT INTO things VALUES (NULL)")
        add(database, "after")
    assert names(database) == []
    add(database, "later")
    assert names(database) == ["later"]


def test_a_failed_statement_inside_takes_back_the_whole(database):
    with pytest.raises(BrokerError, match="rolled back"), database.transaction():
        add(database, "outer")
        with pytest.raises(BrokerError, match="NOT NULL"):
            add(database, None)
    assert names(database) == []


def test_what_waits_for_the_end_hears_how_it_ended(database):
    heard = []
    database.at_end(heard.append)
    assert heard == [True]
    with database.transaction():
        database.at_end(heard.append)
        assert heard == [True]
    assert heard == [True, True]
    with pytest.raises(ZeroDivisionError), database.transaction():
        database.at_end(heard.append)
        1 / 0  # noqa: B018
    assert heard == [True, True, False]


def test_another_thread_is_outside_of_this_ones_transaction(database):
    heard = []
    with database.transaction():
        thread = threading.Thread(target=lambda: database.at_end(heard.append))
        thread.start()
        thread.join()
        assert heard == [True]


def test_changes_tells_of_writes_from_everywhere(path, database):
    other = Database(path)
    seen = database.changes()
    assert database.changes() == seen
    for writer in (database, other, database):
        add(writer, "x")
        assert database.changes() != seen
        seen = database.changes()
    other.close()


def test_equal_files_have_equal_keys_and_memories_have_their_own(path, tmp_path):
    (tmp_path / "link").symlink_to(tmp_path / "deep")
    first, second = Database(path), Database(str(tmp_path / "link" / "er" / "queues.db"))
    assert first.key == second.key
    memories = [Database(":memory:") for _ in range(2)]
    assert memories[0].key != memories[1].key
    for database in (first, second, *memories):
        database.close()


def test_a_closed_database_says_so(database):
    database.close()
    database.close()
    for use in (database.read, database.transaction):
        with pytest.raises(BrokerError, match="closed"), use():
            pass
    with pytest.raises(BrokerError, match="closed"):
        database.changes()


def test_an_sqlite_that_is_too_old_is_refused(path, monkeypatch):
    monkeypatch.setattr(sqlite3, "sqlite_version_info", (3, 34, 1))
    with pytest.raises(ConfigurationError, match=r"3\.35\.0 or newer"):
        Database(path)


def test_migration_goes_on_from_where_it_was(path):
    database = Database(path)
    database.migrate("a", [TABLE])
    database.migrate("b", ["CREATE TABLE b (n);\nCREATE INDEX b_n ON b (n);"])
    database.close()
    database = Database(path)
    database.migrate("a", [TABLE, "ALTER TABLE things ADD COLUMN size INTEGER; -- new\n"])
    database.migrate("a", [TABLE, "ALTER TABLE things ADD COLUMN size INTEGER;"])
    with database.statement() as connection:
        connection.execute("INSERT INTO things VALUES ('a', 1)")
    with pytest.raises(ConfigurationError, match="newer aztask"):
        database.migrate("a", [TABLE])
    database.close()


def test_a_failed_migration_leaves_nothing(path):
    database = Database(path)
    with pytest.raises(BrokerError):
        database.migrate("a", [TABLE, "CREATE TABLE things (again);"])
    database.migrate("a", [TABLE])
    assert names(database) == []
    database.close()


def refused(path):
    with pytest.raises(ConfigurationError) as caught:
        Engine(Database(str(path)))
    text = str(caught.value)
    assert text.isprintable()
    return text


def test_a_file_of_garbage_is_refused_and_left_alone(tmp_path):
    path = tmp_path / "garbage"
    for content in (b"garbage " * 1000, b"SQLite format 3\0" + bytes(range(256)) * 64):
        path.write_bytes(content)
        assert str(path) in refused(path)
        assert path.read_bytes() == content


def test_a_database_of_another_program_is_refused_and_left_alone(tmp_path):
    path = tmp_path / "other.db"
    other = sqlite3.connect(path)
    other.execute("CREATE TABLE theirs (n)")
    other.close()
    before = path.read_bytes()
    assert "another program" in refused(path)
    assert path.read_bytes() == before


@pytest.mark.parametrize("number", range(12))
def test_another_process_may_make_the_file_at_any_moment(path, monkeypatch, number):
    """Before each statement of those that open a new file."""
    statements = []

    class Interrupted(PatientConnection):
        def execute(self, sql, parameters=(), /):
            statements.append(sql)
            if len(statements) == number + 1:
                with monkeypatch.context() as context:
                    context.setattr(database_module, "PatientConnection", PatientConnection)
                    other = Database(path)
                    other.migrate("test", [TABLE])
                    add(other, "theirs")
                    other.close()
            return super().execute(sql, parameters)

    monkeypatch.setattr(database_module, "PatientConnection", Interrupted)
    database = Database(path)
    database.migrate("test", [TABLE])
    assert len(statements) > number
    assert names(database) == ["theirs"]
    database.close()


def test_an_empty_file_is_taken(tmp_path):
    path = tmp_path / "empty"
    path.touch()
    Database(str(path)).close()


@pytest.mark.parametrize("name", ["", "a\0b", "x" * 300, "file/under"])
def test_a_path_that_cannot_be_is_refused(tmp_path, name):
    (tmp_path / "file").touch()
    refused(f"{tmp_path}/{name}" if name else "")


def test_a_directory_is_refused(tmp_path):
    assert "is a directory" in refused(tmp_path)


def test_an_unknown_durability_is_refused(path):
    with pytest.raises(ConfigurationError, match="process"):
        Database(path, durability="none")


@pytest.mark.parametrize(("durability", "level"), [("process", 1), ("full", 2)])
def test_durability_decides_what_is_synced(path, durability, level):
    database = Database(path, durability=durability)
    with database.read() as connection:
        assert connection.execute("PRAGMA synchronous").fetchone() == (level,)
        assert connection.execute("PRAGMA journal_mode").fetchone() == ("wal",)
    database.close()


@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
def test_a_fork_waits_for_a_thread_that_is_inside_sqlite(database):
    """SQLite's own locks, held at a fork, would stay locked in the child."""
    inside, left = threading.Event(), threading.Event()

    def work():
        with database.statement():
            inside.set()
            time.sleep(0.2)
            left.set()

    thread = threading.Thread(target=work)
    thread.start()
    assert inside.wait(5)
    child = os.fork()
    if child == 0:
        os._exit(0 if left.is_set() else 1)
    assert os.waitpid(child, 0)[1] == 0
    thread.join()
    with database.statement() as connection:
        assert connection.execute("SELECT 1").fetchone() == (1,)


def test_a_forked_child_cannot_use_it_and_does_no_harm(path, database):
    """The child is made inside of a transaction, its lock taken: the worst moment."""
    with database.transaction():
        add(database, "before")
        child = os.fork()
        if child == 0:
            os._exit(in_child(database))
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    add(database, "after")
    assert names(database) == ["before", "after"]
    again = Database(path)
    assert names(again) == ["before", "after"]
    again.close()


def in_child(database):
    try:
        database.changes()
    except BrokerError as error:
        if "forked" not in str(error):
            return 2
        database.close()
        del database
        gc.collect()
        return 0
    return 1


def test_values_that_cannot_be_stored_are_refused_in_plain_words():
    database = Database(":memory:")
    engine = Engine(database)
    engine.create_queue("q")
    with pytest.raises(EncodeError, match="surrogates"):
        engine.send("q", [NewMessage(b"x", "\ud800")])
    with pytest.raises(EncodeError, match="64-bit"):
        engine.cancel_scheduled("q", [2**63])
    with database.read() as connection:
        connection.setlimit(sqlite3.SQLITE_LIMIT_LENGTH, 10_000)
    with pytest.raises(MessageTooLarge):
        engine.send("q", [NewMessage(b"x" * 20_000)])
    assert engine.send("q", [NewMessage(b"x", "\0")])
    assert engine.receive("q", 1)[0].message_id == "\0"
    database.close()


def test_pages_in_memory_are_large(path):
    """A commit may look through every page in memory: a million messages are to be few of them."""
    sizes = {}
    for place in (":memory:", path):
        database = Database(place)
        database.migrate("test", [TABLE])
        with database.read() as connection:
            (sizes[place],) = connection.execute("PRAGMA page_size").fetchone()
        database.close()
    assert sizes == {":memory:": 8192, path: 2048}


CHECKED_AGAIN = 0.002  # seconds after which the path of an open file is checked again


def test_a_busy_user_notices_too_that_the_file_is_gone(path, database):
    """Each use within the time of one check does not put the next check off."""
    Path(path).unlink()
    until = time.monotonic() + 10 * CHECKED_AGAIN
    with pytest.raises(BrokerError, match="deleted or replaced"):
        while time.monotonic() < until:
            database.changes()


@pytest.mark.parametrize("how", ["deleted", "replaced by a copy", "replaced by a new file"])
def test_a_file_that_is_gone_is_not_worked_on(path, database, how):
    with database.statement() as connection:
        connection.execute("CREATE TABLE kept (n)")
    copy = Path(f"{path}.copy")
    copy.write_bytes(Path(path).read_bytes())
    time.sleep(CHECKED_AGAIN)
    Path(path).unlink()
    if how == "replaced by a copy":
        copy.rename(path)
    elif how == "replaced by a new file":
        Database(path).close()
    for use in (database.transaction, database.statement, database.read):
        with pytest.raises(BrokerError, match="was deleted or replaced while it was open"), use():
            pytest.fail("it was used")
    for call in (database.changes, lambda: database.change("DELETE FROM kept", ())):
        with pytest.raises(BrokerError, match="restart the processes that use it"):
            call()
    database.close()


def test_a_file_that_is_back_is_used_again(path, database):
    """A rename away and back, as some backups do it."""
    time.sleep(CHECKED_AGAIN)
    Path(path).rename(f"{path}.away")
    with pytest.raises(BrokerError, match="deleted or replaced"):
        database.changes()
    Path(f"{path}.away").rename(path)
    database.changes()


# -- what interrupts a thread ------------------------------------------------------------------


class Interrupted(BaseException):
    """Such as a time limit, which is raised in the thread of a plain task."""


def calls_of(work, interrupt=None):
    """Do the work; returns the functions of aztask that it calls. The `interrupt`th one raises.

    They are found by doing it, so that a new one is not forgotten. The exit of a ``with`` is not
    interrupted: nothing of ours could release the lock then.
    """
    found = []

    def trace(frame, event, _):
        code = frame.f_code
        if event == "call" and code.co_filename.startswith(PACKAGE) and code.co_name != "__exit__":
            found.append(code.co_name)
            if len(found) == interrupt:
                raise Interrupted(found[-1])

    before = sys.gettrace()
    gc.disable()  # else the end of an object of another test is interrupted, too
    sys.settrace(trace)
    try:
        work()
    finally:
        sys.settrace(before)
        gc.enable()
    return found


def added(database):
    add(database, "x")


def changed(database):
    database.change("INSERT INTO things VALUES (?)", ("x",))


def committed(database):
    with database.transaction():
        add(database, "x")
        with database.transaction():
            database.change("INSERT INTO things VALUES (?)", ("y",))


def rolled_back(database):
    with suppress(ZeroDivisionError), database.transaction():
        add(database, "x")
        1 / 0  # noqa: B018


WORKS = (added, changed, committed, rolled_back, names, Database.changes, Database.file_id)


@pytest.mark.parametrize("work", WORKS, ids=lambda work: work.__name__)
def test_whatever_interrupts_a_thread_leaves_the_file_to_the_others(database, work):
    def do():
        database._checked = 0.0  # look whether the file is still there
        work(database)

    seen = []

    def other():
        seen[:] = [names(database)]

    places = calls_of(do)
    assert "_enter" in places
    for number, place in enumerate(places, 1):
        with database.statement() as connection:
            connection.execute("DELETE FROM things")
        seen.clear()
        with suppress(Interrupted):
            calls_of(do, interrupt=number)
        thread = threading.Thread(target=other, daemon=True)
        thread.start()
        thread.join(10)
        assert seen, f"the lock is held, since {place} was interrupted"
        assert seen[0] in ([], ["x"], ["x", "y"])
        assert work is not committed or len(seen[0]) != 1
        assert not database.in_transaction()
        assert not database._connection.in_transaction
        committed(database)  # and a further transaction can begin
