"""Watching the sources of an app: real files, a real watch."""

import importlib.util
import sys
import threading
from types import ModuleType

import pytest
import waiting

from aztask.errors import ConfigurationError
from aztask.operate.cli.reload import Reloader, compiles, require_library, source_files

PATIENCE = 20.0


class Watched:
    """A loaded module under the watched folder, and a reloader that watches it."""

    def __init__(self, folder):
        self.path = folder / "watched.py"
        self.calls = []
        self.restarted = threading.Event()
        self.reloader = Reloader(folder, self._changed)

    def _changed(self):
        self.calls.append(threading.current_thread().name)
        self.restarted.set()

    def write_until(self, text, condition, what):
        """Write the file until `condition`: a watch takes a moment to begin."""
        for number in range(100):
            self.path.write_text(f"{text}# {number}\n")
            try:
                waiting.wait_until(condition, 0.2, what)
            except AssertionError:
                continue
            return
        raise AssertionError(what)


@pytest.fixture
def watched(tmp_path, monkeypatch):
    made = Watched(tmp_path)
    made.path.write_text("x = 1\n")
    module = ModuleType("watched")
    module.__file__ = str(made.path)
    monkeypatch.setitem(sys.modules, "watched", module)
    made.reloader.start()
    yield made
    made.reloader.stop()


def test_a_change_is_reported_once(watched):
    assert not watched.reloader.due
    watched.write_until("x = 2\n", watched.restarted.is_set, "the change is reported")
    watched.reloader.stop()
    assert watched.reloader.due
    assert watched.calls == ["aztask-reload"]


def test_a_file_that_does_not_compile_is_reported_and_waited_for(watched, caplog):
    broken = "watched.py does not compile"
    watched.write_until("def (\n", lambda: broken in caplog.text, "the mistake is logged")
    assert not watched.reloader.due
    watched.write_until("x = 3\n", watched.restarted.is_set, "the change is reported")


def test_a_file_that_an_editor_replaces_is_still_watched(watched):
    def replaced():
        new = watched.path.with_suffix(".tmp")
        new.write_text("x = 4\n")
        new.replace(watched.path)
        return watched.restarted.wait(0.1)

    waiting.wait_until(replaced, PATIENCE, "the change is reported")


def test_a_file_that_no_module_came_from_is_not_watched(watched):
    (watched.path.parent / "output.py").write_text("x = 1\n")
    assert not watched.restarted.wait(1.0)
    watched.write_until("x = 2\n", watched.restarted.is_set, "the watch runs")


def test_a_watch_without_changes_ends_when_it_is_stopped(watched):
    watched.reloader.stop()
    assert not watched.reloader.due
    assert watched.calls == []


def test_an_app_from_elsewhere_is_a_warning(tmp_path, caplog):
    reloader = Reloader(tmp_path, lambda: None)
    reloader.start()
    waiting.wait_until(lambda: "watches nothing" in caplog.text, PATIENCE, "the warning")
    reloader.stop()


def test_a_watch_that_fails_leaves_the_worker_running(watched, monkeypatch, caplog):
    def watch(*folders, **options):
        raise OSError("OS file watch limit reached")

    monkeypatch.setattr("watchfiles.watch", watch)
    reloader = Reloader(watched.path.parent, watched.restarted.set)
    reloader.start()
    waiting.wait_until(lambda: "watch limit" in caplog.text, PATIENCE, "the error is logged")
    reloader.stop()  # so that its record reaches the handlers of this test only
    assert not watched.restarted.is_set()


def test_only_sources_under_the_folder_are_watched(tmp_path):
    inside, outside, compiled, built_in = map(ModuleType, "abcd")
    inside.__file__ = str(tmp_path / "a.py")
    outside.__file__ = "/elsewhere/b.py"
    compiled.__file__ = str(tmp_path / "c.so")
    found = source_files(tmp_path, [inside, outside, compiled, built_in])
    assert found == {tmp_path / "a.py"}


def test_a_file_that_is_gone_does_not_compile(tmp_path, caplog):
    assert not compiles(tmp_path / "gone.py")
    assert caplog.text == ""


def test_without_the_library_one_line_says_what_to_install(cli, monkeypatch):
    require_library()
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ConfigurationError, match=r'pip install "aztask\[reload\]"'):
        require_library()
    ended = cli("worker", "-A", "nosuch", "--reload")
    assert ended.code == 4
    assert ended.error == '--reload needs watchfiles: pip install "aztask[reload]"'
