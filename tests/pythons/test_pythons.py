"""How the driver reads this machine's settings, and that nothing it mounts is left behind."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.pythons.checks import Python
from tests.pythons.places import (
    ISOLATED,
    InChroot,
    NotHere,
    OnMachine,
    local_paths,
    read_settings,
)


def test_the_settings_of_pip_become_variables():
    listed = (
        ":env:.timeout='180'\n"
        "global.extra-index-url='file:///opt/one/simple file:///opt/two/simple'\n"
        "global.index-url='https://example.org/simple'\n"
        "install.trusted-host='\\na\\nb'\n"
        "no setting\n"
    )
    assert read_settings(listed) == {
        "PIP_TIMEOUT": "180",
        "PIP_EXTRA_INDEX_URL": "file:///opt/one/simple file:///opt/two/simple",
        "PIP_INDEX_URL": "https://example.org/simple",
        "PIP_TRUSTED_HOST": "a b",
    }


def test_local_files_are_known_inside():
    values = ["file:///opt/one/simple https://example.org", "/etc/ssl/cert.pem", "180"]
    assert local_paths(values) == ["/etc/ssl/cert.pem", "/opt/one"]


def test_a_missing_debootstrap_is_one_line(tmp_path, monkeypatch):
    monkeypatch.setattr("shutil.which", lambda name: None)
    with pytest.raises(NotHere, match=r"^debootstrap is missing: apt-get install debootstrap$"):
        InChroot(Python("3.13", "trixie"), tmp_path, tmp_path).prepare()


def test_a_missing_python_is_one_line(tmp_path):
    with pytest.raises(NotHere, match=r"^there is no python3\.99 here$"):
        OnMachine(Python("3.99"), tmp_path, tmp_path).prepare()


def mounted_under(folder):
    lines = Path("/proc/self/mountinfo").read_text().splitlines()
    return [line for line in lines if str(folder) in line]


@pytest.mark.skipif(os.geteuid() != 0, reason="only root mounts")
def test_mounts_end_with_the_process_even_if_it_is_killed(tmp_path):
    (tmp_path / "inner").mkdir()
    script = f"mount -t tmpfs tmpfs {tmp_path}/inner && touch {tmp_path}/inner/up && sleep 60"
    process = subprocess.Popen([*ISOLATED, "sh", "-c", script])
    seen = Path(f"/proc/{process.pid}/root{tmp_path}/inner/up")
    until = time.monotonic() + 10
    while not seen.exists():
        assert time.monotonic() < until
        time.sleep(0.01)
    assert mounted_under(tmp_path) == []
    os.kill(process.pid, signal.SIGKILL)
    process.wait()
    assert mounted_under(tmp_path) == []
    assert not (tmp_path / "inner" / "up").exists()


def test_the_command_line_says_what_was_not_tried(tmp_path):
    words = ["--work", str(tmp_path), "--only", "3.12", "install"]
    done = subprocess.run(
        [sys.executable, "-m", "tests.pythons", *words],
        env={**os.environ, "PATH": "/nowhere", "PYENV_ROOT": "/nowhere"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, done.stdout) == (0, "3.12: not tried: there is no python3.12 here\n")
