import hashlib
import os

import pytest

from aztask import App
from aztask.operate.cli.demo_work import (
    FAIL_ONE_IN,
    count_names,
    facts,
    fails_first,
    files_under,
    portable,
    register,
)


def test_facts_of_a_text(tmp_path):
    (tmp_path / "a.txt").write_bytes(b"one\ntwo\n")
    assert facts(str(tmp_path), "a.txt") == {
        "size": 8,
        "lines": 2,
        "sha256": hashlib.sha256(b"one\ntwo\n").hexdigest(),
    }


def test_facts_of_python_count_the_names(tmp_path):
    (tmp_path / "a.py").write_text("import os\nx = 1\ndef f(y): return y\n")
    assert facts(str(tmp_path), "a.py")["names"] == 3  # os, x, f


@pytest.mark.parametrize(
    "source", [b"def (", b"\x00", b"\xff\xfe", b"# coding: nosuch\n", b"(" * 100_000]
)
def test_python_that_does_not_compile_has_no_names(source):
    assert count_names(source) is None


def test_what_cannot_be_read_is_said_the_same_way_on_both_sides(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "broken").symlink_to("nowhere")
    (tmp_path / "folder").mkdir()
    assert facts(str(tmp_path), "missing") == {"error": "FileNotFoundError"}
    assert facts(str(tmp_path), "broken") == {"error": "FileNotFoundError"}
    assert facts(str(tmp_path), "pipe") == {"error": "not a regular file"}
    assert facts(str(tmp_path), "folder") == {"error": "not a regular file"}


def test_which_files_are_taken(tmp_path):
    for name in ("b/x.py", "a/y.txt", "a/__pycache__/y.pyc", "site-packages/z.py", "top"):
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "broken").symlink_to("nowhere")
    (tmp_path / "loop").symlink_to(tmp_path)
    assert list(files_under(str(tmp_path))) == ["broken", "top", "a/y.txt", "b/x.py"]


def test_a_name_that_is_no_text_travels_as_bytes(tmp_path):
    name = os.fsdecode(b"odd\xff.txt")
    try:
        (tmp_path / name).write_bytes(b"x")
    except OSError:
        pytest.skip("this file system takes only text as names")
    assert portable(name) == b"odd\xff.txt"
    assert portable("plain") == "plain"
    assert facts(os.fsencode(tmp_path), portable(name)) == facts(str(tmp_path), name)
    assert fails_first(portable(name)) == fails_first(name)
    app = App("demo", broker="local://:memory:")
    assert register(app).delay(str(tmp_path), portable(name)).id
    app.close()


def test_about_one_in_twenty_fails_at_first():
    names = [f"module_{number}.py" for number in range(10_000)]
    share = sum(map(fails_first, names)) / len(names)
    assert share == pytest.approx(1 / FAIL_ONE_IN, rel=0.2)
    assert [fails_first(name) for name in names] == [fails_first(name) for name in names]
