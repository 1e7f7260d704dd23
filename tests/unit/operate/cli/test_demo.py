"""How the demo judges and counts its results; `tests/integration/test_demo.py` runs it."""

from pathlib import Path

import pytest

import aztask
from aztask.operate.cli import demo
from aztask.operate.cli.demo import DemoFile, _right
from aztask.operate.cli.demo_work import facts
from aztask.settlement import Complete
from aztask.stores.records.base import Outcome, RunKey, RunRecord, State


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "a.txt").write_text("one\ntwo\n")
    return str(tmp_path)


def demo_file(value, state=State.SUCCEEDED, hop=0):
    outcome = Outcome(state, Complete(), None, at=1e9, duration=0.25)
    record = RunRecord(RunKey("a", 0, hop), "demo.examine", "demo", state, outcome=outcome)
    return DemoFile("a.txt", record, value)


def test_a_right_result(folder):
    value = facts(folder, "a.txt")
    made = demo_file(value)
    assert _right(folder, made, value)
    assert (made.succeeded, made.retried, made.seconds) == (True, False, 0.25)


def test_a_wrong_result(folder):
    assert not _right(folder, demo_file({"size": 1}), facts(folder, "a.txt"))


def test_a_file_that_changed_is_computed_again(folder, tmp_path):
    before = facts(folder, "a.txt")
    (tmp_path / "a.txt").write_text("three\n")
    assert _right(folder, demo_file(facts(folder, "a.txt")), before)


def test_a_task_that_failed_or_never_ran(folder):
    value = facts(folder, "a.txt")
    failed = demo_file(value, State.FAILED, hop=3)
    assert not _right(folder, failed, value)
    assert failed.retried
    missing = DemoFile("a.txt", None, None)
    assert (missing.succeeded, missing.retried, missing.seconds) == (False, False, 0.0)


def test_an_empty_folder_is_not_found(cli, tmp_path):
    (tmp_path / "empty").mkdir()
    ended = cli("demo", tmp_path / "empty")
    assert ended.code == 5
    assert "there is no file under" in ended.error


def test_a_path_that_does_not_exist_is_wrong_usage(cli):
    assert cli("demo", "nosuch").code == 2


def test_without_a_folder_of_the_standard_library_it_examines_aztask(tmp_path, monkeypatch):
    monkeypatch.setattr(demo.sysconfig, "get_paths", lambda: {"stdlib": str(tmp_path / "Lib")})
    root, names = demo._input(None)
    assert Path(root) == Path(aztask.__file__).parent
    assert "app.py" in names or "errors.py" in names
