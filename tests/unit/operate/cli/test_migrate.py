"""``aztask migrate check``: lines, JSON, exit codes, and how sure it is."""

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


def test_names_that_the_table_does_not_have_are_listed_as_unknown(cli, project):
    (project / "shop.py").write_text("from kombu.nowhere import thing\nthing()\n")
    ended = cli("migrate", "check", "project")
    assert ended.code == 1
    assert ended.out.startswith("project/shop.py:2: kombu.nowhere.thing: no, because it is not in")
    assert ended.out.endswith("(unknown)\n")
    assert "1 without a counterpart, 1 of them unknown" in ended.err


def test_a_use_that_is_judged_by_a_name_is_likely(cli, project):
    (project / "shop.py").write_text(
        "from elsewhere import app\n@app.task(throws=OSError)\ndef f(): ...\n"
    )
    (line,) = cli("migrate", "check", "project", "--json").out.splitlines()
    assert json.loads(line)["sure"] == "likely"


def test_a_rewrite_is_a_diff_and_changes_nothing(cli, project):
    ended = cli("migrate", "rewrite", "project")
    assert ended.code == 0
    assert "--- a/project/shop.py\n+++ b/project/shop.py\n" in ended.out
    assert (
        "+from aztask import App\n" in ended.out and "+# aztask: throws: no, because" in ended.out
    )
    assert ended.err == "1 file to change\n"
    assert (project / "shop.py").read_text() == SOURCE


def test_a_rewrite_is_written_if_you_say_so(cli, project):
    ended = cli("migrate", "rewrite", "project", "--write")
    assert (ended.code, ended.out, ended.err) == (0, "", "1 file changed\n")
    assert 'app = App("shop")' in (project / "shop.py").read_text()
    assert cli("migrate", "rewrite", "project").err == "0 files to change\n"


def test_a_rewrite_names_what_it_cannot_read(cli, project):
    (project / "bad.py").write_text("import celery (\n")
    ended = cli("migrate", "rewrite", "project")
    assert ended.code == 1
    assert "project/bad.py:1: not read: syntax error" in ended.out
    assert "could not read 1 file" in ended.err


def test_the_missing_extra_is_one_line(cli, project, monkeypatch):
    for name in [
        name for name in sys.modules if name.startswith(("libcst", "aztask.celery.migration"))
    ]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "libcst", None)
    ended = cli("migrate", "rewrite", "project")
    assert ended.code == 4
    assert 'pip install "aztask[migrate]"' in ended.err and ended.err.count("\n") == 1
    assert cli("migrate", "check", "project").code == 1
