"""The watching process of the portable shell: when the worker ends, it ends the pool.

Linux kills the children of a process that dies, if they ask for it; other systems do not. A pool
process notices the end of its sockets, but not while a task holds the interpreter, in a call of C
for example. So a small process beside them reads from a pipe whose other end only the worker has.
At the end of that file, however the worker died, it kills the pool processes and removes the
worker's private folder.

Rules
1. A worker tells the pipe of a folder before it makes it, and of a pool process before that gets
   its setup. What is in the pipe arrives, also from a worker that has died. A process without its
   setup has loaded no code of the app; it ends by itself at the end of its own input.
2. This file imports nothing but the standard library: it is started as a script, in milliseconds.
3. If the watching process dies, the worker starts another within a tick and tells it everything
   again. Crash window: a worker that dies in that tick leaves those pool processes behind that a
   task holds, until the task lets go, and its folder.
4. On Windows a job object does the killing, in the kernel, and has no such window.

Process ids are told before a process can end and taken back after it was waited for. A worker that
dies between these two steps may have a process id killed that the system has given to another
process since; it would have to be handed out again within that millisecond.
"""

from __future__ import annotations

import logging
import os
import select
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Final, NoReturn

logger = logging.getLogger("aztask.worker")

ENDING_SECONDS: Final = 5.0
LOOK_SECONDS: Final = 1.0
REMOVALS: Final = 30
"""Tries, a tenth of a second apart, to remove a folder that killed processes still write to."""

ENDING: Final = [
    getattr(signal, name)
    for name in ("SIGTERM", "SIGINT", "SIGHUP", "SIGQUIT")
    if hasattr(signal, name)
]
"""The signals that end a worker, and that its manager may send to each of its processes."""

KILL: Final = getattr(signal, "SIGKILL", signal.SIGTERM)  # Windows ends a process at once at both
HAS_GROUPS: Final = hasattr(os, "killpg")  # as in `aztask.worker.platform`, see rule 2

LAUNCHER: Final = "__PYVENV_LAUNCHER__"
"""Tells the interpreter which virtual environment it belongs to, on Windows."""

GROUP: Final = getattr(subprocess, "CREATE_NEW_PROCESS_GROUP", 0)
"""For `Popen` on Windows: Ctrl-C reaches the worker alone."""


class WatchingProcess:
    """The worker's handle of its watching process. Raises OSError if none can be started."""

    def __init__(self) -> None:
        self._folder = ""
        self._pids: set[int] = set()
        self._job = _job()
        self._process = _started()

    def make_folder(self) -> Path:
        """Make the worker's folder, for its user alone, which is removed when the worker ends."""
        base = Path(tempfile.gettempdir())
        while True:
            self._folder = str(base / f"aztask-{os.getpid()}-{os.urandom(8).hex()}")
            self._tell(f"folder {os.fsencode(self._folder).hex()}")
            with suppress(FileExistsError):
                Path(self._folder).mkdir(mode=0o700)
                return Path(self._folder)

    def watch(self, process: subprocess.Popen[bytes]) -> None:
        """Have this pool process killed when the worker ends."""
        if self._job is not None:
            self._job.add(process)
        self._pids.add(process.pid)
        self._tell(f"watch {process.pid}")

    def forget(self, pid: int) -> None:
        """The pool process has ended."""
        self._pids.discard(pid)
        self._tell(f"forget {pid}")

    def check(self) -> None:
        """Replace a watching process that has ended; cheap enough for every tick."""
        if self._process.poll() is None:
            return
        status = self._process.returncode
        self._close_pipe()
        try:
            self._process = _started()
        except OSError as error:
            logger.error("no process can watch this worker now: %s; it is tried again", error)
            return
        if self._folder:
            self._tell(f"folder {os.fsencode(self._folder).hex()}")
        for pid in self._pids:
            self._tell(f"watch {pid}")
        logger.warning(
            "the process that watches this worker has ended (status %s), another one does now",
            status,
        )

    def close(self) -> None:
        """End it; the pool processes have ended."""
        if self._folder:
            shutil.rmtree(self._folder, ignore_errors=True)
        self._close_pipe()
        try:
            self._process.wait(ENDING_SECONDS)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def _tell(self, line: str) -> None:
        pipe = self._process.stdin
        if pipe is not None:
            with suppress(OSError):  # it has ended: `check` tells the next one
                pipe.write(line.encode() + b"\n")

    def _close_pipe(self) -> None:
        if self._process.stdin is not None:
            with suppress(OSError):
                self._process.stdin.close()


def start_python(
    arguments: Sequence[str], *, environment: Mapping[str, str] | None = None, **options: Any
) -> subprocess.Popen[bytes]:
    """Start this interpreter with these arguments; options: of `Popen`. Raises OSError.

    In a virtual environment of Windows, ``python.exe`` is a launcher that starts the real
    interpreter as its child. That one is started directly, as `multiprocessing` does it: else
    sockets would be shared with the launcher, and the watching process had the wrong parent.
    """
    program = sys.executable
    base = getattr(sys, "_base_executable", None) or program
    if not HAS_GROUPS and os.path.normcase(base) != os.path.normcase(program):
        given = os.environ if environment is None else environment
        environment = {**given, LAUNCHER: program}
        program = base
    command = [program, *arguments]
    return subprocess.Popen(command, env=environment, **options)  # noqa: S603  # without a shell


def _started() -> subprocess.Popen[bytes]:
    """Start the script, which no signal to all processes of a worker ends, at no moment."""
    masks = hasattr(signal, "pthread_sigmask")  # a new program inherits what is blocked
    before = signal.pthread_sigmask(signal.SIG_BLOCK, ENDING) if masks else ()
    try:
        # -P: the script's folder has modules of ours whose names must not hide those of Python.
        return start_python(
            ["-P", __file__, str(os.getpid())],
            bufsize=0,
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            start_new_session=True,
            creationflags=GROUP,
        )
    finally:
        if masks:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)


if sys.platform == "win32":
    import ctypes
    from ctypes import wintypes

    class _Limits(ctypes.Structure):
        """JOBOBJECT_EXTENDED_LIMIT_INFORMATION; only `flags` is used."""

        _fields_ = (
            ("times", ctypes.c_int64 * 2),
            ("flags", wintypes.DWORD),
            ("sizes", ctypes.c_size_t * 2),
            ("processes", wintypes.DWORD),
            ("affinity", ctypes.c_size_t),
            ("classes", wintypes.DWORD * 2),
            ("counters", ctypes.c_uint64 * 6),
            ("memory", ctypes.c_size_t * 4),
        )

    class JobObject:
        """A job whose processes the kernel kills when the worker's handle of it closes (rule 4).

        Written after Microsoft's documentation of job objects; not tried on a real Windows.
        """

        def __init__(self) -> None:
            self._kernel = ctypes.WinDLL("kernel32", use_last_error=True)
            self._kernel.CreateJobObjectW.restype = wintypes.HANDLE
            self._job = wintypes.HANDLE(self._kernel.CreateJobObjectW(None, None))
            limits = _Limits(flags=0x2000)  # JOB_OBJECT_LIMIT_KILL_ON_JOB_CLOSE
            extended = 9  # JobObjectExtendedLimitInformation
            self._check(
                self._kernel.SetInformationJobObject(
                    self._job, extended, ctypes.byref(limits), ctypes.sizeof(limits)
                )
            )

        def add(self, process: subprocess.Popen[bytes]) -> None:
            """Put the process into the job."""
            handle = wintypes.HANDLE(int(process._handle))
            self._check(self._kernel.AssignProcessToJobObject(self._job, handle))

        def _check(self, done: int) -> None:
            if not done:
                raise ctypes.WinError(ctypes.get_last_error())


def _job() -> Any:
    """The job object of this worker on Windows, else None."""
    if sys.platform == "win32":
        return JobObject()
    return None


# -- the watching process itself


class Watched:
    """What is to be ended with the worker. Two threads may call `end`; the first one does it."""

    def __init__(self) -> None:
        self._folder = ""
        self._pids: set[int] = set()
        self._ending = threading.Lock()

    def note(self, line: bytes) -> None:
        """Obey a line of the worker."""
        word, _, value = line.decode().strip().partition(" ")
        if word == "folder":
            self._folder = os.fsdecode(bytes.fromhex(value))
        elif word == "watch":
            self._pids.add(int(value))
        elif word == "forget":
            self._pids.discard(int(value))

    def end(self) -> NoReturn:
        """Kill the processes, remove the folder, and end."""
        with self._ending:
            for pid in list(self._pids):
                _kill(pid)
            for _ in range(REMOVALS):
                if self._folder:
                    shutil.rmtree(self._folder, ignore_errors=True)
                if not self._folder or not Path(self._folder).exists():
                    break
                time.sleep(0.1)
            os._exit(0)


def _kill(pid: int) -> None:
    """Kill a pool process, and its group: what its tasks have started."""
    for kill in (getattr(os, "killpg", None), os.kill):
        if kill is not None:
            with suppress(OSError):  # it has ended
                kill(pid, KILL)


def _look_for_parent(parent: int, watched: Watched) -> None:
    """End when the parent has, also if another process has kept its end of the pipe open."""
    while os.getppid() == parent:  # on Windows it never changes
        time.sleep(LOOK_SECONDS)
    # What the parent has told is read first (rule 1), by the main thread; at the end of the file
    # there is always something to read, and the main thread ends this process.
    while select.select([sys.stdin], [], [], LOOK_SECONDS)[0]:
        time.sleep(LOOK_SECONDS / 100)
    watched.end()


def main() -> None:
    """Watch until the worker, whose process id the command line gives, has ended."""
    for number in ENDING:  # the worker alone decides when it ends
        signal.signal(number, signal.SIG_IGN)
    watched = Watched()
    threading.Thread(target=_look_for_parent, args=(int(sys.argv[1]), watched), daemon=True).start()
    for line in sys.stdin.buffer:
        watched.note(line)
    watched.end()


if __name__ == "__main__":
    main()
