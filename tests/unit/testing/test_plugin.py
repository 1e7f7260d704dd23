"""The pytest plugin, in runs of pytest of its own."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
APP = """
import os, time
from aztask import App

app = App("shop", broker="servicebus://nowhere.invalid")

@app.task
def add(a, b):
    return a + b

@app.task
def parent(n):
    return add.delay(n, 1).id

@app.task
def pid():
    return os.getpid()
"""
TESTS = """
import os
from shop import add, parent, pid
from aztask.errors import TaskFailed

def test_inline(aztask_inline):
    assert add.delay(1, 2).get() == 3
    aztask_inline.assert_sent(add, 1, 2)

def test_worker(aztask_worker):
    assert add.with_options(task_id="one").delay(1, 2).get(timeout=30) == 3
    first = pid.delay().get(timeout=30)
    assert first != os.getpid()
    print("pid", first)
    for _ in range(3):
        add.with_options(delay=3600).delay(1, 1)

def test_the_next_one_sees_nothing_of_it(aztask_worker, aztask_app):
    stats = aztask_app.broker.stats("default")
    assert (stats.active, stats.leased, stats.scheduled) == (0, 0, 0)
    assert add.with_options(task_id="one").delay(3, 4).get(timeout=30) == 7
    print("pid", pid.delay().get(timeout=30))

def test_sends_of_tasks_stay_private(aztask_worker, aztask_app):
    nested = parent.delay(5).get(timeout=30)
    assert aztask_app.result(nested).get(timeout=30) == 6
    aztask_worker.wait_until_idle()
    assert "succeeded" in aztask_worker.log

def test_without_a_fixture_the_broker_is_the_apps_own(aztask_app):
    assert aztask_app.address == "servicebus://nowhere.invalid"
"""


def run_pytest(folder, *arguments, code=0):
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-p", PLUGIN, *arguments]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(folder), str(ROOT)])}
    done = subprocess.run(
        command,
        check=False,
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == code, done.stdout + done.stderr
    return done.stdout + done.stderr


PLUGIN = "aztask.testing.plugin"


@pytest.fixture
def project(tmp_path):
    (tmp_path / "shop.py").write_text(APP)
    (tmp_path / "test_shop.py").write_text(TESTS)
    (tmp_path / "pytest.ini").write_text("[pytest]\naztask_app = shop:app\n")
    return tmp_path


def test_the_fixtures(project):
    shown = run_pytest(project, "-s")
    assert "5 passed" in shown
    pids = re.findall(r"pid (\d+)", shown)
    assert len(pids) == 2
    assert len(set(pids)) == 1, "one worker serves all tests"


def test_options_of_the_worker(project):
    settings = project / "pytest.ini"
    settings.write_text(settings.read_text() + "aztask_worker_options = --pool nosuch\n")
    shown = run_pytest(project, "-k", "test_worker", code=1)
    assert "the worker ended with 2" in shown
    assert "nosuch" in shown


def test_an_app_that_is_not_named(project):
    (project / "pytest.ini").write_text("[pytest]\n")
    shown = run_pytest(project, "-k", "inline", code=1)
    assert "name your app in pytest's configuration" in shown


def test_loading_it_imports_nothing_of_aztask():
    script = (
        "import sys, pytest\n"
        "import aztask.testing.plugin\n"
        "ours = sorted(name for name in sys.modules if name.startswith('aztask'))\n"
        "ours = [name.removeprefix('aztask.') for name in ours]\n"
        "former = ['support', 'support.formernames']\n"
        "assert ours == ['aztask', *former, 'testing', 'testing.plugin', 'version'], ours\n"
        "assert 'kombu' not in sys.modules\n"
    )
    subprocess.run(
        [sys.executable, "-c", script], check=True, timeout=60,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )  # fmt: skip


def test_pytest_finds_it_by_its_entry_point():
    text = (ROOT / "setup.cfg").read_text()
    assert f"pytest11 =\n    {PLUGIN} = {PLUGIN}\n" in text
