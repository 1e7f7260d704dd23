import os
import sys
from types import ModuleType

import pytest

from aztask.cli.reload import Reloader, source_files


@pytest.fixture
def module(tmp_path, monkeypatch):
    """A loaded module under the watched folder."""
    path = tmp_path / "watched.py"
    path.write_text("x = 1\n")
    made = ModuleType("watched")
    made.__file__ = str(path)
    monkeypatch.setitem(sys.modules, "watched", made)
    return path


def change(path, text, age):
    path.write_text(text)
    os.utime(path, (age, age))


def test_a_changed_file_is_found_once(tmp_path, module):
    reloader = Reloader(tmp_path, lambda: None)
    assert reloader.look() == []
    assert reloader.look() == []
    change(module, "x = 2\n", 1e9)
    assert reloader.look() == [module]
    assert reloader.look() == []


def test_a_file_that_does_not_compile_is_waited_for(tmp_path, module, caplog):
    reloader = Reloader(tmp_path, lambda: None)
    reloader.look()
    change(module, "def (", 1e9)
    assert reloader.look() == []
    assert "watched.py does not compile" in caplog.text
    change(module, "x = 3\n", 1e9 + 1)
    assert reloader.look() == [module]


def test_a_file_that_is_gone_for_a_moment_is_waited_for(tmp_path, module):
    reloader = Reloader(tmp_path, lambda: None)
    reloader.look()
    module.unlink()
    assert reloader.look() == []
    change(module, "x = 4\n", 1e9)
    assert reloader.look() == [module]


def test_only_sources_under_the_folder_are_watched(tmp_path, module):
    outside, compiled, built_in = ModuleType("a"), ModuleType("b"), ModuleType("c")
    outside.__file__ = "/elsewhere/a.py"
    compiled.__file__ = str(tmp_path / "b.so")
    assert source_files(tmp_path, [sys.modules["watched"], outside, compiled, built_in]) == [module]
