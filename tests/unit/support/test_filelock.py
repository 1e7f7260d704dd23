"""Locks on files between processes, with each way in which a system has them."""

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
# As on Windows, without its module: record locks of Unix stand in for the locked bytes.
WINDOWS = """
import os, sys, types
import fcntl as unix
msvcrt = types.ModuleType("msvcrt")
msvcrt.LK_NBLCK = 2
def locking(descriptor, mode, count):
    unix.lockf(descriptor, unix.LOCK_EX | unix.LOCK_NB, count, os.lseek(descriptor, 0, os.SEEK_CUR))
msvcrt.locking = locking
sys.modules["msvcrt"] = msvcrt
sys.modules["fcntl"] = None
"""
NEITHER = "import sys\nsys.modules['fcntl'] = sys.modules['msvcrt'] = None\n"
HOLD = """
import os, sys
from aztask.support.private import try_lock
descriptor = os.open(sys.argv[1], os.O_RDWR | os.O_APPEND | os.O_CREAT)
print(try_lock(descriptor), flush=True)
os.write(descriptor, b"line")
print(os.fstat(descriptor).st_size, flush=True)
sys.stdin.read()
"""
WAIT = """
import os, sys
from aztask.support.private import wait_for_lock
descriptor = os.open(sys.argv[1], os.O_RDWR)
print("waits", flush=True)
wait_for_lock(descriptor)
print("has it", flush=True)
"""


def start(program, path):
    return subprocess.Popen(
        [sys.executable, "-c", program, str(path)],
        cwd=ROOT,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )


@pytest.mark.parametrize("system", ["", WINDOWS], ids=["unix", "windows"])
def test_one_process_has_the_lock_until_it_dies(tmp_path, system):
    path = tmp_path / "file"
    with start(system + HOLD, path) as first:
        assert first.stdout.readline() == "True\n"
        with start(system + HOLD, path) as second:
            assert second.stdout.readline() == "False\n"
            second.kill()
        first.kill()
    with start(system + HOLD, path) as third:
        assert third.stdout.readline() == "True\n"
        third.kill()


@pytest.mark.parametrize("system", ["", WINDOWS], ids=["unix", "windows"])
def test_a_waiting_process_gets_the_lock_of_a_dead_one(tmp_path, system):
    path = tmp_path / "file"
    with start(system + HOLD, path) as holder:
        assert holder.stdout.readline() == "True\n"
        assert holder.stdout.readline() == "4\n"  # what is written is at the end, not at the lock
        with start(system + WAIT, path) as waiting:
            assert waiting.stdout.readline() == "waits\n"
            holder.kill()
            assert waiting.stdout.readline() == "has it\n"


def test_without_locks_there_is_an_error_or_no_wait(tmp_path):
    (tmp_path / "file").touch()
    with start(NEITHER + WAIT, tmp_path / "file") as waiting:
        assert waiting.stdout.read() == "waits\nhas it\n"
    program = NEITHER + HOLD.replace("print(try_lock(descriptor)", "try_lock(descriptor), print(1")
    with start(program, tmp_path / "file") as trying:
        trying.stdin.close()
        assert trying.stdout.read() == ""
    assert trying.returncode == 1
