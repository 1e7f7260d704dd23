"""``aztask migrate check``: lines, JSON, exit codes, and the missing extra."""

import json
import sys

import pytest

SOURCE = """\
from celery import Celery
app = Celery("shop")

@app.task(throws=OSError, queue="a")
def f(): ...
"""


@pytest.fixture
def project(tmp_path, monkeypatch):
    folder = tmp_path / "project"
    folder.mkdir()
    (folder / "shop.py").write_text(SOURCE)
    monkeypatch.chdir(tmp_path)
    return folder


def test_uses_without_a_counterpart_have_a_line_each(cli, project):
    ended = cli("migrate", "check", "project")
    assert ended.code == 1
    assert ended.out.startswith("project/shop.py:4: task throws: no, because ")
    assert len(ended.out.splitlines()) == 1
    assert ended.err.startswith("1 file: 4 uses of Celery, 1 without a counterpart; --all")


def test_all_lists_every_use(cli, project):
    ended = cli("migrate", "check", "project", "--all")
    assert ended.code == 1
    assert "project/shop.py:4: task queue: @app.task(queue=...)\n" in ended.out


def test_json_is_one_object_for_each_use(cli, project):
    (project / "bad.py").write_text("import celery (\n")
    ended = cli("migrate", "check", "project", "--json")
    use, bad = map(json.loads, ended.out.splitlines())
    assert (use["file"], use["line"], use["section"], use["name"]) == (
        "project/shop.py", 4, "task", "throws"
    )  # fmt: skip
    assert use["missing"] is True and use["error"] is None
    assert bad["file"] == "project/bad.py" and bad["line"] == 1 and "syntax" in bad["error"]
    assert ended.code == 1 and "could not read 1 file" in ended.err


def test_a_project_without_gaps_is_ok(cli, project):
    (project / "shop.py").write_text(SOURCE.replace("throws=OSError, ", ""))
    ended = cli("migrate", "check", "project")
    assert (ended.code, ended.out) == (0, "")


def test_nothing_to_read_is_not_found(cli, tmp_path):
    assert cli("migrate", "check", str(tmp_path / "nowhere")).code == 2
    (tmp_path / "empty").mkdir()
    ended = cli("migrate", "check", str(tmp_path / "empty"))
    assert ended.code == 5 and "there is no Python file" in ended.err


def test_the_missing_extra_is_one_line(cli, project, monkeypatch):
    for name in [
        name for name in sys.modules if name.startswith(("libcst", "aztask.celery.migration"))
    ]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "libcst", None)
    ended = cli("migrate", "check", "project")
    assert ended.code == 4
    assert 'pip install "aztask[migrate]"' in ended.err and ended.err.count("\n") == 1
