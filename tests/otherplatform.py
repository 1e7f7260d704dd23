"""Runs aztask as on macOS or Windows: what only Linux or only Unix has is removed first.

Usage: ``python tests/otherplatform.py macos|windows -m MODULE ARGUMENTS``, or a file instead of
``-m MODULE``.

The standard library, which has its own code for each system, is loaded before and works as on
Linux; so what it calls itself, such as os.statvfs and os.WNOHANG, stays. What is loaded afterwards
(aztask, Click, Kombu, the Azure SDKs) finds neither the modules nor the functions.
"""

from __future__ import annotations

import asyncio
import ctypes
import importlib.abc
import multiprocessing.connection  # noqa: F401  # loaded before, as are the following
import os
import platform
import runpy
import select
import signal
import socket
import ssl  # noqa: F401
import subprocess
import sys
import tempfile  # noqa: F401
import threading
import time
from pathlib import Path
from typing import Any

MODULES: dict[str, tuple[str, ...]] = {
    "macos": (),
    "windows": ("fcntl", "grp", "pwd", "resource", "termios", "tty", "pty", "syslog", "posix"),
}
"""The modules that cannot be imported."""

LINUX = {
    os: (
        "eventfd eventfd_read eventfd_write EFD_CLOEXEC EFD_NONBLOCK memfd_create MFD_CLOEXEC "
        "pidfd_open sched_getaffinity sched_setaffinity posix_fadvise splice copy_file_range"
    ),
    signal: "pidfd_send_signal",
    socket: "SOCK_SEQPACKET MSG_CMSG_CLOEXEC SOCK_CLOEXEC SOCK_NONBLOCK TCP_USER_TIMEOUT",
    select: "epoll",
    time: "CLOCK_BOOTTIME",
}
"""What exists on Linux alone."""

UNIX = {
    os: (
        "fork forkpty register_at_fork posix_spawn posix_spawnp chown fchown lchown fchmod getuid "
        "geteuid getgid getegid setsid getsid getpgid killpg O_CLOEXEC O_NONBLOCK "
        "O_DIRECTORY O_NOFOLLOW O_SYNC mkfifo sysconf nice getloadavg "
        "waitid pread pwrite fdatasync wait3 wait4 getpgrp setpgid getgroups setuid setgid uname "
        "execv execve execvp execvpe"
    ),
    signal: (
        "SIGKILL SIGHUP SIGQUIT SIGUSR1 SIGUSR2 SIGCHLD SIGCONT SIGSTOP SIGPIPE SIGALRM "
        "pthread_kill pthread_sigmask sigwait sigwaitinfo sigtimedwait sigpending setitimer alarm "
        "pause siginterrupt"
    ),
    socket: "AF_UNIX CMSG_SPACE CMSG_LEN send_fds recv_fds MSG_DONTWAIT SCM_RIGHTS",
    select: "poll POLLIN POLLOUT POLLHUP POLLERR",
    time: "clock_gettime CLOCK_MONOTONIC CLOCK_REALTIME",
}
"""What exists on Unix, and not on Windows. (Its os.execv exists, and does something else.)"""


class Missing(importlib.abc.MetaPathFinder):
    """Makes the import of some modules fail."""

    def __init__(self, names: tuple[str, ...]) -> None:
        self.names = names

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> None:
        """Raise ImportError for these names; others are found elsewhere."""
        if name in self.names:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)


class NoInotify(ctypes.CDLL):
    """A C library without inotify. Windows cannot even open the one of the process."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith(("inotify", "prctl", "__inotify")):
            raise AttributeError(name)
        return super().__getattr__(name)


def _refuse(*_: Any) -> None:
    raise NotImplementedError


def _terminate_processes() -> None:
    """Have every signal to another process end it at once, as TerminateProcess does on Windows."""
    kill, at_once = os.kill, signal.SIGKILL
    os.kill = lambda pid, _: kill(pid, at_once)  # type: ignore[assignment]

    def end(process: subprocess.Popen[Any], *_: Any) -> None:
        if process.poll() is None:
            kill(process.pid, at_once)

    for name in ("kill", "terminate", "send_signal"):
        setattr(subprocess.Popen, name, end)


def _share_sockets() -> None:
    """Give sockets `share` and the module `fromshare`, by which Windows passes them on."""
    send, receive, family = socket.send_fds, socket.recv_fds, socket.AF_UNIX

    def share(self: socket.socket, pid: int) -> bytes:
        kept = self.dup()
        name = b"\0aztask-shared-" + os.urandom(8).hex().encode()
        server = socket.socket(family)
        server.bind(name)
        server.listen(1)

        def give() -> None:
            peer, _ = server.accept()
            credentials = peer.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12)
            if int.from_bytes(credentials[:4], sys.byteorder) == pid:  # it is given to no other one
                send(peer, [b"x"], [kept.fileno()])
            for each in (peer, kept, server):
                each.close()

        threading.Thread(target=give, daemon=True).start()
        return name

    def fromshare(name: bytes) -> socket.socket:
        peer = socket.socket(family)
        peer.connect(name)
        with peer:
            _, (descriptor,), _, _ = receive(peer, 1, 1)
        return socket.socket(fileno=descriptor)

    socket.socket.share = share  # type: ignore[attr-defined]
    socket.fromshare = fromshare  # type: ignore[attr-defined]


def _loopback_pair(*_: Any) -> tuple[socket.socket, socket.socket]:
    """A pair of sockets as Windows makes it, where a pair is a connection over the loopback."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        client = socket.create_connection(server.getsockname())
        return server.accept()[0], client


def _launch(launcher: str) -> None:
    """Have ``sys.executable`` be a launcher that starts Python, as in an environment of Windows."""
    if "__PYVENV_LAUNCHER__" not in os.environ:  # else Python has done the same
        sys.executable = launcher


def become(system: str, *, launcher: str = "") -> None:
    """Remove from this process what `system`, "macos" or "windows", does not have.

    launcher: the program that starts Python there, on Windows.
    """
    if system == "windows":
        if launcher:
            _launch(launcher)
        socket.socketpair = _loopback_pair  # type: ignore[assignment]
        _terminate_processes()
        _share_sockets()
    names = MODULES[system]
    for name in names:
        sys.modules.pop(name, None)
    sys.meta_path.insert(0, Missing(names))
    for table in (LINUX,) if system == "macos" else (LINUX, UNIX):
        for module, attributes in table.items():
            for attribute in attributes.split():
                vars(module).pop(attribute, None)
    platform.system = lambda: "Darwin" if system == "macos" else "Windows"
    ctypes.CDLL = NoInotify  # type: ignore[misc]
    if system == "windows" and "pytest" in sys.orig_argv:  # it has its own code for each, too
        import _pytest.tmpdir  # noqa: PLC0415  # most programs are not pytest

        _pytest.tmpdir.get_user_id = lambda: None
    if system == "windows":
        asyncio.SelectorEventLoop.add_signal_handler = _refuse  # type: ignore[method-assign]


if __name__ == "__main__":
    become(sys.argv[1])
    sys.argv = sys.argv[2:]
    sys.path[0] = str(Path.cwd())
    if sys.argv[0] == "-m":
        sys.argv = sys.argv[1:]
        runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
    else:
        runpy.run_path(sys.argv[0], run_name="__main__")
