"""``aztask demo`` as a process: on small trees, on a terminal, and broken off."""

import errno
import fcntl
import json
import os
import pty
import signal
import struct
import subprocess
import sys
import termios
import time
from pathlib import Path

import pytest
from harness import ROOT, wait_until

from aztask.operate.cli.demo_work import fails_first

pytestmark = pytest.mark.applications


@pytest.fixture
def tree(tmp_path):
    """Files of many kinds, some of whose tasks fail at first."""
    root = tmp_path / "tree"
    (root / "inner").mkdir(parents=True)
    for number in range(60):
        (root / f"module_{number}.py").write_text(f"x = {number}\nimport os\n")
    (root / "inner" / "broken.py").write_text("def (")
    (root / "inner" / "bytes").write_bytes(bytes(range(256)))
    (root / "inner" / "empty").touch()
    (root / "inner" / "dangling").symlink_to("nowhere")
    os.mkfifo(root / "pipe")
    return root


@pytest.fixture
def scratch(tmp_path):
    """Where the demo makes its temporary folder."""
    folder = tmp_path / "scratch #1?x=50%25"
    folder.mkdir()
    return folder


def start(scratch, *arguments, **options):
    environment = {
        **{name: value for name, value in os.environ.items() if not name.startswith("AZTASK_")},
        "PYTHONPATH": str(ROOT),
        "TMPDIR": str(scratch),
        "AZTASK_BROKER": "redis://never-used",  # the demo has a broker of its own
        "AZTASK_WORKER_CONCURRENCY": "none",
    }
    return subprocess.Popen(
        [sys.executable, "-m", "aztask", "demo", *map(str, arguments)],
        env=environment,
        stdin=subprocess.DEVNULL,
        **{"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True, **options},
    )


def run(scratch, *arguments, **options):
    process = start(scratch, *arguments, **options)
    out, err = process.communicate(timeout=120)
    return process.returncode, out, err


def names_of(root):
    return [
        str(path.relative_to(root))
        for path in root.rglob("*")
        if path.is_symlink() or path.is_file()
    ]


def living(scratch):
    """Processes that the demo started: they have its temporary folder in their environment."""
    mark, found = f"TMPDIR={scratch}".encode(), []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit() and int(entry.name) != os.getpid():
            try:
                if mark in (entry / "environ").read_bytes():
                    found.append(int(entry.name))
            except OSError:
                continue
    return found


def test_every_result_is_right(tree, scratch):
    code, out, err = run(scratch, tree, "--json")
    assert code == 0, err
    summary = json.loads(out.splitlines()[-1])
    names = names_of(tree)
    assert summary.pop("seconds") > 0
    assert summary == {
        "tasks": len(names),
        "succeeded": len(names),
        "retried": sum(map(fails_first, names)),
    }
    assert summary["retried"] > 0
    assert f"{len(names)} of {len(names)} tasks" in err
    assert list(scratch.iterdir()) == []
    assert living(scratch) == []


def test_the_table_shows_it(tree, scratch):
    code, out, _ = run(scratch, tree)
    assert code == 0
    fields = dict(line.split(":", 1) for line in out.split("\n\n")[0].splitlines())
    assert fields["tasks"].strip() == fields["succeeded"].strip() == str(len(names_of(tree)))
    assert int(fields["retried"]) > 0
    assert fields["failed"].strip() == "0"
    assert "SLOWEST FILES" in out


def test_one_file(tree, scratch):
    code, out, _ = run(scratch, tree / "module_1.py", "--json")
    assert code == 0
    assert json.loads(out)["tasks"] == 1


def test_a_name_that_is_no_text(tree, scratch):
    try:
        (tree / os.fsdecode(b"odd\xff\x1b[31m.txt")).write_text("x")
    except OSError as error:
        assert error.errno == errno.EILSEQ
        pytest.skip("this file system takes only text as names")
    assert run(scratch, tree, "--json")[0] == 0


@pytest.mark.parametrize(
    ("name", "code", "words"), [("nosuch", 2, "does not exist"), ("empty", 5, "there is no file")]
)
def test_a_path_without_files(tmp_path, scratch, name, code, words):
    (tmp_path / "empty").mkdir()
    ended = run(scratch, tmp_path / name)
    assert ended[:2] == (code, "")
    (line,) = ended[2].splitlines()
    assert line.startswith("aztask: error: ")
    assert words in line


def test_on_a_terminal_a_bar_is_drawn(tree, scratch):
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 100, 0, 0))
    process = start(scratch, tree, stdout=theirs, stderr=theirs)
    os.close(theirs)
    shown = b""
    while True:
        try:
            data = os.read(ours, 4096)
        except OSError:  # the other side is closed
            break
        if not data:
            break
        shown += data
    os.close(ours)
    assert process.wait(60) == 0
    text = shown.decode()
    drawn = [line for line in text.replace("\n", "").split("\r") if line.startswith("[")]
    assert len(drawn) >= 2
    assert "[" + "#" * 30 + "]" in drawn[-1]
    assert "\x1b[1m" in text  # the table's head


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_broken_off_it_leaves_nothing_behind(tmp_path, scratch, number):
    root = tmp_path / "many"
    root.mkdir()
    source = "\n".join(f"name_{n} = {n}" for n in range(20_000))
    for n in range(400):
        (root / f"large_{n}.py").write_text(source)
    process = start(scratch, root)
    wait_until(lambda: len(living(scratch)) >= 3, 30, "worker and pool run")
    time.sleep(0.3)
    process.send_signal(number)
    out, err = process.communicate(timeout=30)
    assert process.returncode == (130 if number == signal.SIGINT else 128 + number)
    assert out == ""
    assert "Traceback" not in err
    assert "error" not in err
    wait_until(lambda: living(scratch) == [], 5, "no process is left")
    assert list(scratch.iterdir()) == []


def test_a_wrong_result_is_found(tree, scratch, tmp_path):
    """A worker that computes something else: the demo says which files, and fails."""
    (tmp_path / "sitecustomize.py").write_text(
        "import sys\n"
        "if 'worker' in sys.orig_argv:\n"
        "    import aztask.operate.cli.demo_work as work\n"
        "    right = work.facts\n"
        "    def wrong(root, name):\n"
        "        found = right(root, name)\n"
        "        return {**found, 'size': 0} if name == 'module_7.py' else found\n"
        "    work.facts = wrong\n"
    )
    environment = {"PYTHONPATH": f"{tmp_path}{os.pathsep}{ROOT}", "TMPDIR": str(scratch)}
    ended = subprocess.run(
        [sys.executable, "-m", "aztask", "demo", str(tree), "--json"],
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert ended.returncode == 1
    assert "1 result of 64 wrong: module_7.py" in ended.stderr.splitlines()[-1]
