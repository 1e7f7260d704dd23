"""What an overseer decides without processes: how options are divided, and what probes say."""

from __future__ import annotations

import socket

import pytest

from aztask.errors import ConfigurationError
from aztask.worker import options, overseer, platform
from aztask.worker.options import (
    WorkerOptions,
    advised_supervisors,
    divided,
    most_supervisors,
)
from aztask.worker.overseer import LineSocket, OverseenSupervisor, Overseer, OverseerLink


def test_the_parts_of_all_supervisors_make_the_whole() -> None:
    whole = WorkerOptions(concurrency=7, max_tasks=100, prefetch=2, prefetch_bytes=1000, name="w")
    parts = [divided(whole, number, 3, f"w.{number}") for number in (1, 2, 3)]
    for name in ("concurrency", "max_tasks", "prefetch", "prefetch_bytes"):
        values = [getattr(part, name) for part in parts]
        assert sum(values) == getattr(whole, name), name
        assert max(values) - min(values) <= 1, name
    assert [part.name for part in parts] == ["w.1", "w.2", "w.3"]
    assert {part.max_sessions for part in parts} == {None}, "what is not given stays so"
    with pytest.raises(ConfigurationError):
        divided(whole, 8, 8, "w.8")  # it would run no task


def test_the_option_that_leaves_a_supervisor_without_work_is_named() -> None:
    given = {"concurrency": 8, "max_tasks": None, "max_sessions": None}
    assert most_supervisors(given) == (8, "--concurrency")
    assert most_supervisors({**given, "max_tasks": 2}) == (2, "--max-tasks")


def test_auto_is_a_core_each_and_less_on_a_file(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(options, "cores", lambda: 16)
    given = {"concurrency": 8, "max_tasks": None, "max_sessions": 100}
    assert advised_supervisors(given, remote=True) == 8, "no more than run tasks"
    assert advised_supervisors({**given, "concurrency": 99}, remote=True) == 16
    assert advised_supervisors(given, remote=False) == options.LOCAL_SUPERVISORS
    monkeypatch.setattr(options, "cores", lambda: 1)
    assert advised_supervisors(given, remote=False) == 1


@pytest.mark.parametrize(
    ("quota", "found"), [("max 100000", 8), ("150000 100000", 2), ("10000 100000", 1), ("", 8)]
)
def test_cores_are_those_of_the_container(tmp_path, monkeypatch, quota, found) -> None:  # type: ignore[no-untyped-def]
    monkeypatch.setattr(platform.os, "sched_getaffinity", lambda _: range(8))
    monkeypatch.setattr(platform, "_QUOTA", tmp_path / "cpu.max")
    if quota:
        (tmp_path / "cpu.max").write_text(f"{quota}\n")
    assert platform.cores() == found


def test_lines_arrive_whole_however_they_were_cut() -> None:
    ours, theirs = socket.socketpair()
    line = LineSocket(ours)
    theirs.sendall(b'{"a": 1}\n{"b"')
    assert line.receive() == [{"a": 1}]
    theirs.sendall(b": 2}\n")
    assert line.receive() == [{"b": 2}]
    theirs.close()
    assert line.receive() == []
    assert line.ended
    line.send({"too": "late"})


def told(supervisor: OverseenSupervisor, *values: dict[str, object]) -> None:
    ours, theirs = socket.socketpair()
    supervisor.line = LineSocket(ours)
    for value in values:
        LineSocket(theirs).send(value)
    supervisor.listen()
    theirs.close()


WELL = {"live": "", "ready": "", "failing": ""}


def test_a_supervisor_is_ready_once_it_says_so() -> None:
    each = OverseenSupervisor("w", 2)
    assert each.probe("ready") == ["supervisor 2: it starts"]
    assert each.probe("live") == []
    told(each, {"up": 3})
    assert (each.up, each.wanted) == (True, 3)
    assert each.probe("ready") == ["supervisor 2: it starts"], "it has not said it"
    told(each, WELL)
    assert each.probe("ready") == []
    told(each, {**WELL, "ready": "one\ntwo"})
    assert each.probe("ready") == ["supervisor 2: one", "supervisor 2: two"]
    each.put_off()
    assert each.probe("ready") == ["supervisor 2: it has died and is started again"]
    each.done = True
    assert each.probe("ready") == []


def test_pauses_grow_while_a_supervisor_keeps_dying() -> None:
    each = OverseenSupervisor("w", 1)
    pauses = [each.put_off() for _ in range(4)]
    assert pauses == sorted(set(pauses)), "each is longer"


def test_a_silent_supervisor_is_not_ready_and_later_not_live(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    now = [1000.0]
    monkeypatch.setattr(overseer.time, "monotonic", lambda: now[0])
    each = OverseenSupervisor("w", 1)
    each.process = object()  # type: ignore[assignment]  # it runs
    told(each, WELL)
    now[0] += overseer.LATE_SECONDS + 1
    assert each.probe("ready") == ["supervisor 1: it has told nothing for 6 s"]
    assert each.probe("live") == []
    now[0] += overseer.STUCK_SECONDS
    assert each.probe("live") == ["supervisor 1: it has told nothing for 66 s"]


def test_a_worker_is_named_after_its_process_unless_it_has_a_name() -> None:
    assert Overseer([], "w", 2).probe("ready") == "supervisor 1: it starts"
    assert Overseer([], "w", 2).metrics() == {1: ""}


def test_a_probe_that_raises_is_told_and_orders_are_obeyed() -> None:
    ours, theirs = socket.socketpair()
    stopped: list[int] = []

    class Worker:
        def stop(self, signum: int = 15, frame: object = None) -> None:
            stopped.append(signum)

    def broken() -> str:
        raise ValueError("a collector of the app")

    link = OverseerLink(ours, {"name": "w.1", "number": 1, "total": 2, "speaks": False})
    link.up(2, Worker())
    link.serve(dict.fromkeys((*overseer.PROBES, "metrics"), broken))
    other = LineSocket(theirs)
    assert other.receive() == [{"up": 2}]
    link._obey({"ask": "metrics"})
    assert other.receive() == [{"metrics": ""}]
    link._obey({"stop": 15})
    assert stopped == [15]
    assert link._said("ready") == "its probe ready failed: ValueError: a collector of the app"
    link._part.stop()
    theirs.close()


def test_a_supervisor_that_cannot_be_started_leaves_no_socket(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    made: list[socket.socket] = []

    def pair() -> tuple[socket.socket, socket.socket]:
        made.extend(socket.socketpair())
        return made[0], made[1]

    def refuse(*arguments: object, **options: object) -> None:
        raise OSError("no more processes")

    monkeypatch.setattr(overseer, "connected_pair", pair)
    monkeypatch.setattr(overseer, "start_python", refuse)
    with pytest.raises(OSError, match="no more processes"):
        OverseenSupervisor("w", 1).start([], 2)
    assert [each.fileno() for each in made] == [-1, -1]
