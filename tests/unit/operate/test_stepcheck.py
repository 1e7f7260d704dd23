"""``aztask steps --check``: open tasks and the code that is here, in a child process."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from aztask.app.loading import load_app
from aztask.operate import stepcheck
from aztask.operate.stepcheck import CHANGED, FAILS, FITS, LATE, UNCHECKED, check, open_tasks
from aztask.steps.home import StepHome
from aztask.stores.rows import Change

OLD = """
import os, socket, time
from pathlib import Path
from aztask import App, Context

app = App("shop", broker="local://", results="local://")
ran = Path("ran.txt")

def act(name):
    with ran.open("a") as file:
        file.write(name + "\\n")
    return name

@app.task_with_context
def order(context: Context, card: str) -> list:
    charge = context.step("charge", act, "charge")
    approval = context.wait_for("approved")
    return [charge, approval, context.step("ship", act, "ship")]
"""
NEW = {
    FITS: (OLD, "it waits for signal approved, until"),
    CHANGED: (
        OLD.replace(
            'context.step("charge"', 'context.step("tax", act, "tax"); context.step("charge"'
        ),
        "the code runs step tax where step charge was recorded",
    ),
    FAILS: (
        OLD.replace(
            "    approval =", "    socket.create_connection(('127.0.0.1', 9))\n    approval ="
        ),
        "OSError: aztask steps --check has no network; make this call in a step",
    ),
    LATE: (
        OLD.replace("    approval =", "    time.sleep(600)\n    approval ="),
        "it came to no step",
    ),
}


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    (tmp_path / "check_shop.py").write_text(OLD)
    yield tmp_path
    sys.modules.pop("check_shop", None)


@pytest.mark.parametrize("end", [FITS, CHANGED, FAILS, LATE])
def test_a_task_that_waits(site: Path, end: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stepcheck, "PATIENCE", 4.0)
    app = load_app("check_shop:app")
    with app.inline():
        for number in range(2):
            app.tasks["shop.order"].with_options(task_id=f"t{number}").delay("visa")
        ran = (site / "ran.txt").read_text()
        code, text = NEW[end]
        (site / "check_shop.py").write_text(code)
        found = list(check("check_shop:app", open_tasks(app, 10)))
    assert [(each.task_id, each.task, each.end) for each in found] == [
        ("t0", "shop.order", end),
        ("t1", "shop.order", end),
    ]
    assert all(each.text.startswith(text) for each in found), found
    assert (site / "ran.txt").read_text() == ran, "no step has run"


def test_only_open_tasks_are_checked(site: Path) -> None:
    app = load_app("check_shop:app")
    with app.inline():
        app.tasks["shop.order"].with_options(task_id="open").delay("visa")
        ended = app.tasks["shop.order"].with_options(task_id="ended").delay("visa")
        ended.signal("approved")
        assert ended.successful()
        (found,) = open_tasks(app, 10)
        assert found.task_id == "open" and found.call


def test_a_damaged_step_is_of_its_task_alone(site: Path) -> None:
    app = load_app("check_shop:app")
    with app.inline():
        for number in range(3):
            app.tasks["shop.order"].with_options(task_id=f"t{number}").delay("visa")
        store = StepHome(app).store()
        (row, *_) = [row for row in store.old(store.now() + 60) if row.place.partition == "t1"]
        assert store._rows.write(Change(row.place, {"data": b"damaged"}, row)) is not None
        found = list(check("check_shop:app", open_tasks(app, 10)))
    assert {each.task_id: each.end for each in found} == {
        "t0": FITS,
        "t1": UNCHECKED,
        "t2": FITS,
    }
    assert "a recorded step of task t1 cannot be read" in next(
        each.text for each in found if each.task_id == "t1"
    )


def test_an_app_that_cannot_be_imported(site: Path) -> None:
    app = load_app("check_shop:app")
    with app.inline():
        app.tasks["shop.order"].with_options(task_id="open").delay("visa")
        for text, why in (
            ("import nothing_of_this_name", "No module named 'nothing_of_this_name'"),
            ("import os; os._exit(3)", "it took longer than 60 s, or ended its process"),
        ):
            (site / "check_shop.py").write_text(text)
            with pytest.raises(Exception, match=f"check_shop:app cannot be imported: .*{why}"):
                list(check("check_shop:app", open_tasks(app, 10)))
