"""Which systems have the portable shell, and what they are told that they cannot do."""

import os
import socket

import pytest

from aztask.worker import platform
from aztask.worker.mailbox import EventBell, SocketBell, make_bell
from aztask.worker.platform import (
    NEEDED,
    VARIABLE,
    connected_pair,
    is_portable,
    lacks,
    memory_of,
)
from aztask.worker.shell import PortableShell, later_shell


@pytest.fixture(autouse=True)
def _unforced(monkeypatch):
    monkeypatch.delenv(VARIABLE, raising=False)


def test_linux_forks():
    assert not is_portable()
    assert not isinstance(later_shell(), PortableShell)
    bell = make_bell()
    assert isinstance(bell, EventBell)
    bell.close()


@pytest.mark.parametrize(("value", "forced"), [("1", True), ("0", False), ("", False)])
def test_the_variable_forces_the_portable_shell(monkeypatch, value, forced):
    monkeypatch.setenv(VARIABLE, value)
    assert is_portable() is forced
    assert isinstance(later_shell(), PortableShell) is forced
    bell = make_bell()
    assert isinstance(bell, SocketBell) is forced
    bell.close()


@pytest.mark.parametrize("number", range(len(NEEDED)))
def test_a_system_that_lacks_one_call_has_the_portable_shell(monkeypatch, number):
    monkeypatch.delattr(*NEEDED[number])
    assert is_portable()


def test_what_a_system_cannot_do_is_said(monkeypatch):
    assert lacks(memory_limit=True) == []
    monkeypatch.setattr(platform, "CAN_SIGNAL_THREADS", False)
    monkeypatch.setattr(platform, "HAS_GROUPS", False)
    monkeypatch.setattr(platform, "memory_of", lambda pid: 0)
    assert len(lacks(memory_limit=False)) == 2
    assert "--max-memory-per-child does nothing" in lacks(memory_limit=True)[-1]


def test_the_memory_of_a_process_that_is_gone_is_not_known():
    assert memory_of(os.getpid()) > 1_000_000
    assert memory_of(2**22 + 1) == 0


@pytest.fixture
def loopback():
    """Makes pairs that are connections over the loopback, as on Windows."""
    ends = []
    with socket.create_server(("127.0.0.1", 0)) as server:

        def pair():
            ends.append(socket.create_connection(server.getsockname()))
            ends.append(server.accept()[0])
            return ends[-2], ends[-1]

        yield pair
    for end in ends:
        end.close()


def test_a_pair_over_the_loopback_is_that_of_one_process(monkeypatch, loopback):
    monkeypatch.setattr(socket, "socketpair", loopback)
    left, right = connected_pair()
    left.send(b"x")
    assert right.recv(1) == b"x"


def test_a_pair_with_an_end_of_another_process_is_refused(monkeypatch, loopback):
    ours, (_, theirs) = loopback()[0], loopback()
    monkeypatch.setattr(socket, "socketpair", lambda: (ours, theirs))
    with pytest.raises(ConnectionAbortedError, match="another process has connected"):
        connected_pair()
    assert (ours.fileno(), theirs.fileno()) == (-1, -1)
