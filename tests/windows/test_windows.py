"""A worker on a Python of Windows, under Wine: what runs, what a kill leaves behind."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from winepython import Windows, lines_with, windows_path

ADDRESS = {"AZTASK_BROKER": "local://", "AZTASK_RESULTS": "local://"}

CHECKING = """
from aztask.app.loading import load_app
from aztask.operate.stepcheck import check, open_tasks

app = load_app("shop:app")
with app.inline():
    for mode in ("waits", "connects"):
        app.tasks["shop.order"].delay(mode)
    for each in check("shop:app", open_tasks(app, 10)):
        print(each.end, each.text)
"""


def aztask(windows: Windows, folder: Path, *arguments: str) -> str:
    return windows.run("-m", "aztask", *arguments, cwd=folder, **ADDRESS)


def test_the_demo(windows: Windows, tmp_path: Path) -> None:
    (tmp_path / "sources").mkdir()
    for number in range(60):
        (tmp_path / "sources" / f"m{number}.py").write_text(f"x = {number}\n")
    shown = aztask(windows, tmp_path, "demo", "--json", "sources")
    found = json.loads(shown.splitlines()[-1])
    assert found["tasks"] == found["succeeded"] == 60


@pytest.mark.parametrize("pool", ["threads", "processes", "solo"])
def test_a_worker(windows: Windows, shop: Path, pool: str) -> None:
    ids = [
        aztask(windows, shop, "-A", "shop", "send", "shop.add", "--args", f"[{number}, 2]").strip()
        for number in (1, 2)
    ]
    log = aztask(windows, shop, "-A", "shop", "worker", "--burst", "--pool", pool)
    assert len(lines_with(log, "stopped: 2 succeeded, 0 failed")) == 1, log
    assert "3" in aztask(windows, shop, "-A", "shop", "result", ids[0])
    assert windows.ended("aztask", 20) == []


@pytest.mark.parametrize("pool", ["threads", "processes"])
def test_a_worker_that_is_killed_leaves_no_process(windows: Windows, shop: Path, pool: str) -> None:
    """The job object ends what a task in a call of C keeps busy."""
    shown = windows.run("killing.py", pool, cwd=shop, **ADDRESS)
    assert "killed" in shown
    assert windows.ended("aztask", 20) == []


@pytest.mark.parametrize("pool", ["threads", "processes"])
def test_a_task_whose_process_died_runs_again(windows: Windows, shop: Path, pool: str) -> None:
    mark = json.dumps([windows_path(shop / "mark")])
    sent = aztask(windows, shop, "-A", "shop", "send", "shop.die_once", "--args", mark).strip()
    aztask(windows, shop, "-A", "shop", "worker", "--burst", "--pool", pool)
    assert "again" in aztask(windows, shop, "-A", "shop", "result", sent)


def test_a_new_project(windows: Windows, tmp_path: Path) -> None:
    aztask(windows, tmp_path, "init", "shop")
    log = windows.shell(
        r"settings\local.cmd",
        'aztask send shop.add_up --args "[[1.5, 2]]"',
        "aztask worker --burst",
        cwd=tmp_path / "shop",
    )
    assert lines_with(log, "stopped: 1 succeeded"), log


def test_open_steps_of_a_coroutine_are_checked(windows: Windows, shop: Path) -> None:
    """Its event loop needs a connection within the process; the task gets none out of it."""
    (shop / "checking.py").write_text(CHECKING)
    shown = windows.run("checking.py", cwd=shop, **ADDRESS)
    assert len(lines_with(shown, "fits it waits for signal approved")) == 1, shown
    refused = "fails OSError: aztask steps --check has no network"
    assert len(lines_with(shown, refused)) == 1, shown


def test_doctor_gives_no_advice_of_unix(windows: Windows, shop: Path) -> None:
    aztask(windows, shop, "-A", "shop", "send", "shop.add", "--args", "[1, 2]")
    shown = aztask(windows, shop, "-A", "shop", "doctor")
    assert "chmod" not in shown
    assert "0 problems" in shown
