"""macOS and Windows: all commands work without what only Linux or Unix has, the worker too.

The commands run in processes from which those modules and functions were removed, see
tests/otherplatform.py. Some run beside a worker that has everything Linux has.
"""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from harness import ROOT
from waiting import wait_until

from aztask import App

HERE = Path(__file__).parent
SYSTEMS = ["macos", "windows"]
LACKING = """
import os
from otherplatform import become
become(os.environ["OTHER_PLATFORM"], launcher=os.environ["LAUNCHER"])
"""
# As python.exe in a virtual environment of Windows: Python is its child, and is killed with it.
LAUNCHER = """#!/bin/sh
setpriv --pdeathsig KILL {python} "$@"
exit $?
"""
SHOP = """
import asyncio
import ctypes
import os
from datetime import timedelta
from pathlib import Path

from aztask import App, RetryPolicy

app = App(
    "shop",
    broker="local://",
    results="local://",
    events="events",
    lease_advice="auto",
    retry=RetryPolicy(max_retries=0),
)


@app.task
def add(a, b):
    return a + b


@app.task
def fail(text):
    raise ValueError(text)


@app.task
def longest(size):
    return "x" * size


@app.task
async def double(number):
    return 2 * number


@app.task(soft_time_limit=1)
def spin():
    while True:
        pass


@app.task(soft_time_limit=1)
async def waits():
    await asyncio.sleep(60)


@app.task
def hold():
    Path("held").write_text(str(os.getpid()))
    ctypes.PyDLL(None).sleep(60)  # the interpreter is held: no other thread runs a line


if __name__ == "__main__":
    first = add.with_options(task_id="by-code").delay(40, 2)
    add.map([(1, 1), (2, 2)])
    app.send("far.away", ["x"], queue="letters")
    with app.receive("letters", wait=timedelta(seconds=10)) as lease:
        lease.ensure()
        lease.complete()
    print("sent", flush=True)
    print(first.get(timeout=timedelta(seconds=60)))
    app.close()
"""
EVERYTHING = """
import importlib
import pkgutil

import aztask

# Spark's modules need PySpark, and tests of their own. Textual, for `aztask top`, Celery, for the
# result backend and its schedules, and MCP's SDK use what Linux has wherever sys.platform is
# Linux's, as it stays here.
# aztask.django.worker is the module that a worker imports: it sets Django up.
LEFT_OUT = (
    "aztask.spark", "aztask.__main__", "aztask.operate.top", "aztask.celery.backend",
    "aztask.operate.celerybeat", "aztask.django.periodic", "aztask.django.worker",
    "aztask.agents.server",
)
names = [
    each.name
    for each in pkgutil.walk_packages(aztask.__path__, "aztask.")
    if not each.name.startswith(LEFT_OUT)
]
for name in names:
    importlib.import_module(name)
print(len(names))
"""


def removed(system, *arguments):
    """The command that runs a program without what `system` lacks."""
    return [sys.executable, str(ROOT / "tests" / "otherplatform.py"), system, *arguments]


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "shop.py").write_text(SHOP)
    return tmp_path


@pytest.fixture
def environment():
    kept = {name: value for name, value in os.environ.items() if not name.startswith("AZTASK_")}
    return {**kept, "PYTHONPATH": str(ROOT), "AZTASK_APP": "shop"}


def run(command, folder, environment, **options):
    return subprocess.run(
        command,
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
        **options,
    )


@pytest.fixture
def tour(folder, environment):
    """Runs command lines in one process of a system; returns what each answered."""

    def answers(system, *lines):
        asked = json.dumps([line if isinstance(line, list) else line.split() for line in lines])
        command = removed(system, str(HERE / "platform_tour.py"))
        ended = run(command, folder, environment, input=asked)
        assert ended.returncode == 0, ended.stderr
        return json.loads(ended.stdout)

    return answers


@pytest.mark.parametrize("system", SYSTEMS)
def test_every_module_can_be_imported(system, folder, environment):
    (folder / "everything.py").write_text(EVERYTHING)
    ended = run(removed(system, "everything.py"), folder, environment)
    assert ended.returncode == 0, ended.stderr
    assert int(ended.stdout) > 200


@pytest.mark.parametrize("system", SYSTEMS)
def test_commands_work_beside_a_worker_on_linux(system, folder, environment, tour):
    sent = tour(
        system,
        "send shop.add --args [1,2] --task-id one",
        'send shop.fail --args ["no"] --task-id two --expires 1h',
        "send shop.add --args [3,4] --task-id three",
        "cancel three",
        "queues --json",
        "queues create extra",
        "queues delete extra --yes",
        "tasks",
        "doctor",
    )
    assert [(code, err) for code, _, err in sent if code] == [], sent
    assert json.loads(sent[4][1])["total"] == 3
    assert "events" in sent[8][1]
    assert sent[8][2] == "0 problems, 0 warnings\n"
    worker = [sys.executable, "-m", "aztask", "worker", "--burst", "-c", "2"]
    arguments = ["-A", "shop:app"]
    ended = run([*worker, *arguments], folder, {**environment, "AZTASK_WORKER_LEASE": "5s"})
    assert ended.returncode == 0, ended.stderr
    seen = tour(
        system,
        "result one --json",
        "result two --json",
        "result three --json",
        "result",
        "dlq list --json",
        "dlq groups",
        "dlq show two",
        "dlq replay two --yes",
        "dlq purge --all --yes",
        "workers",
        "running",
        "--help",
        "worker --help",
        "spark --help",
    )
    states = [json.loads(out)["state"] for _, out, _ in seen[:3]]
    assert states == ["succeeded", "failed", "cancelled"], seen
    assert [code for code, _, _ in seen] == [0] * len(seen), seen


@pytest.mark.parametrize("system", SYSTEMS)
def test_code_sends_and_waits_for_a_result(system, folder, environment):
    waiting = subprocess.Popen(
        removed(system, "shop.py"), cwd=folder, env=environment, stdout=subprocess.PIPE, text=True
    )
    try:
        assert waiting.stdout.readline() == "sent\n"
        worker = [sys.executable, "-m", "aztask", "worker", "-A", "shop:app", "--burst"]
        assert run(worker, folder, environment).returncode == 0
        out, _ = waiting.communicate(timeout=60)
    finally:
        waiting.kill()
        waiting.wait()
    assert (waiting.returncode, out) == (0, "42\n")
    files = [path.name for path in (folder / "events").rglob("*.jsonl") if path.name[0] != "."]
    assert any(name.startswith("sender-") for name in files), files


def launcher_in(place):
    """Make a virtual environment whose Python is a launcher; "" if these tests have none."""
    launcher = place / "bin" / "python"
    if sys.prefix == sys.base_prefix:
        return ""
    if not launcher.exists():
        launcher.parent.mkdir(parents=True)
        (place / "pyvenv.cfg").write_text(Path(sys.prefix, "pyvenv.cfg").read_text())
        (place / "lib").symlink_to(Path(sys.prefix, "lib"))
        launcher.write_text(LAUNCHER.format(python=sys.executable))
        launcher.chmod(0o755)
    return str(launcher)


@pytest.fixture
def lacking(folder, environment):
    """The environment in which every new interpreter lacks what a system does, its children too."""

    def of(system):
        (folder / "sitecustomize.py").write_text(LACKING)
        path = os.pathsep.join([str(folder), environment["PYTHONPATH"], str(ROOT / "tests")])
        return {
            **environment,
            "PYTHONPATH": path,
            "OTHER_PLATFORM": system,
            "LAUNCHER": launcher_in(folder / "venv"),
            "TMPDIR": str(folder),
        }

    return of


@pytest.mark.parametrize("pool", ["processes", "threads", "asyncio"])
@pytest.mark.parametrize("system", SYSTEMS)
def test_a_worker_runs_tasks(system, pool, folder, environment, tour, lacking):
    sent = tour(
        system,
        "send shop.add --args [1,2] --task-id one",
        'send shop.fail --args ["no"] --task-id two --expires 1h',
        "send shop.longest --args [300000] --task-id long",
        "send shop.double --args [21] --task-id awaited",
    )
    assert [code for code, _, _ in sent] == [0] * 4, sent
    worker = [sys.executable, "-m", "aztask", "worker", "--burst", "-c", "2", "--pool", pool]
    ended = run(worker, folder, lacking(system))
    assert ended.returncode == 0, ended.stderr
    assert ("cannot interrupt a blocking call" in ended.stderr) is (system == "windows")
    assert ("no process groups" in ended.stderr) is (system == "windows")
    lines = (f"result {name} --json" for name in ("one", "two", "long", "awaited"))
    one, two, long, awaited = (json.loads(out) for _, out, _ in tour(system, *lines))
    assert (one["value"], long["value"], awaited["value"]) == (3, "x" * 300_000, 42)
    assert two["state"] == "failed"
    assert not list(folder.glob("aztask-*")), "its private folder is removed"


@pytest.mark.parametrize("system", SYSTEMS)
def test_a_task_is_interrupted_at_its_soft_time_limit(system, folder, tour, lacking):
    tour(system, "send shop.spin --task-id spin", "send shop.waits --task-id waits")
    ended = run([sys.executable, "-m", "aztask", "worker", "--burst"], folder, lacking(system))
    assert ended.returncode == 0, ended.stderr
    assert ended.stderr.count("TimeLimitExceeded") >= 2
    assert "the pool process was ended" not in ended.stderr


@pytest.mark.parametrize("system", SYSTEMS)
def test_a_killed_worker_leaves_nothing_behind(system, folder, tour, lacking):
    """The task's process would run for a minute more: it holds its interpreter."""
    tour(system, "send shop.hold --task-id hold")
    worker = subprocess.Popen(
        [sys.executable, "-m", "aztask", "worker"], cwd=folder, env=lacking(system)
    )
    held = folder / "held"
    wait_until(lambda: held.exists() and held.read_text(), 30, "the task runs")
    pid = int(held.read_text())
    worker.kill()
    worker.wait()
    wait_until(lambda: not Path(f"/proc/{pid}").exists(), 10, "its process ends")
    wait_until(lambda: not list(folder.glob("aztask-*")), 10, "its private folder is removed")


@pytest.mark.parametrize("system", SYSTEMS)
def test_the_demo_runs_its_worker(system, folder, lacking):
    (folder / "texts").mkdir()
    for number in range(5):
        (folder / "texts" / f"{number}.txt").write_text("a b c\n" * number)
    demo = [sys.executable, "-m", "aztask", "demo", str(folder / "texts"), "--json"]
    ended = run(demo, folder, lacking(system))
    assert ended.returncode == 0, ended.stderr
    assert json.loads(ended.stdout)["succeeded"] == 5


@pytest.mark.parametrize("system", SYSTEMS)
def test_the_emulator_serves_and_is_stopped(system, folder, environment, tour):
    options = ["--port", "0", "--admin-port", "0", "--queue", "orders", "--json"]
    command = ["-m", "aztask", "emulator", *options]
    emulator = subprocess.Popen(
        removed(system, *command), cwd=folder, env=environment, stdout=subprocess.PIPE, text=True
    )
    try:
        ready = json.loads(emulator.stdout.readline())
        app = App("shop", broker=ready["connection_string"])
        environment.update(AZTASK_BROKER=ready["connection_string"])
        environment.pop("AZTASK_APP")
        answers = tour(system, "send shop.add --queue orders")
        assert answers[0][0] == 0, answers
        (message,) = app.broker.peek("orders", limit=5)
        assert message.envelope.subject == "shop.add"
        app.close()
        emulator.send_signal(signal.SIGTERM)
        assert emulator.wait(30) == 0
    finally:
        emulator.kill()
        emulator.communicate()


def test_a_storage_queue_takes_what_is_sent(azurite, folder, environment, tour):
    environment.update(AZTASK_BROKER=azurite.connection_string)
    environment.pop("AZTASK_APP")
    lines = ["queues create orders", "send shop.add --queue orders", "queues --json", "dlq list"]
    answers = tour("windows", *lines)
    assert [code for code, _, _ in answers] == [0, 0, 0, 0], answers
    assert json.loads(answers[2][1])["total"] == 1


NOTEBOOK = """
import asyncio
import __main__
from pathlib import Path

assert not hasattr(__main__, "__file__")


async def cell():  # the kernel of a notebook runs them in its event loop
    from aztask.testing import background_worker
    import shop

    with background_worker(shop.app, "shop:app", Path.cwd()) as worker:
        print(shop.add.delay(40, 2).get(timeout=60))
        worker.wait_until_idle()
    return worker.process.returncode is not None


print(asyncio.run(cell()))
"""
PLUGIN = """
from news.app import app

def test_a_worker(aztask_worker):
    assert app.send("news.count_words", ["a b c"]).get(timeout=30) == 3
"""
STATION = """
from pathlib import Path
from aztask import App
from aztask.testing import background_worker

app = App("station", broker="local://", results="local://")


@app.task
def add(a, b):
    return a + b


if __name__ == "__main__":
    with background_worker(app, "station.__main__:app", Path.cwd()):
        print(add.delay(40, 2).get(timeout=60))
"""


def no_process_has(folder):
    """Whether no process has this folder as its own for temporary files."""
    mark = f"TMPDIR={folder}".encode()
    for entry in Path("/proc").iterdir():
        try:
            if entry.name.isdigit() and mark in (entry / "environ").read_bytes().split(b"\0"):
                return False
        except OSError:
            continue
    return True


def nothing_is_left(folder):
    wait_until(lambda: no_process_has(folder), 15, "all processes end")
    wait_until(lambda: not list(folder.glob("aztask-*")), 10, "the private folder is removed")


@pytest.mark.parametrize("system", SYSTEMS)
def test_a_notebook_has_a_worker(system, folder, lacking):
    ended = run([sys.executable, "-c", NOTEBOOK], folder, lacking(system))
    assert (ended.returncode, ended.stdout) == (0, "42\nTrue\n"), ended.stderr
    nothing_is_left(folder)


@pytest.mark.parametrize("system", SYSTEMS)
def test_a_main_module_has_a_worker_and_is_the_app_of_one(system, folder, lacking):
    (folder / "station").mkdir()
    (folder / "station" / "__init__.py").touch()
    (folder / "station" / "__main__.py").write_text(STATION)
    environment = {**lacking(system), "AZTASK_APP": ""}
    ended = run([sys.executable, "-m", "station"], folder, environment)
    assert (ended.returncode, ended.stdout) == (0, "42\n"), ended.stderr
    aztask = [sys.executable, "-m", "aztask", "-A", "station.__main__"]
    send = ["send", "station.add", "--args", "[1, 2]", "--task-id", "one"]
    for command in (send, ["worker", "--burst"], ["result", "one"]):
        ended = run([*aztask, *command], folder, environment)
        assert ended.returncode == 0, ended.stderr
    assert ended.stdout.split()[-1] == "3"
    nothing_is_left(folder)


@pytest.mark.parametrize("system", SYSTEMS)
def test_the_tests_of_a_new_project_pass_and_have_the_plugins_worker(system, folder, lacking):
    environment = {**lacking(system), "AZTASK_APP": ""}
    ended = run([sys.executable, "-m", "aztask", "init", "news"], folder, environment)
    assert ended.returncode == 0, ended.stderr
    project = folder / "news"
    (project / "tests" / "test_plugin.py").write_text(PLUGIN)
    # Other plugins look at sys.platform, which is Linux's here, for what they may import.
    environment |= {"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
    options = ["-p", "no:cacheprovider", "-p", "aztask.testing.plugin"]
    options += ["-o", "aztask_app=news.app:app"]
    ended = run([sys.executable, "-m", "pytest", "-q", *options], project, environment)
    assert "3 passed" in ended.stdout, ended.stdout + ended.stderr
    nothing_is_left(folder)


@pytest.mark.parametrize("system", SYSTEMS)
def test_a_worker_that_reloads_starts_anew_and_stays_one_command(system, folder, tour, lacking):
    log = folder / "log"
    with log.open("wb") as stream:
        command = [sys.executable, "-m", "aztask", "worker", "-c", "1", "--reload"]
        worker = subprocess.Popen(
            command, cwd=folder, env=lacking(system), stdout=stream, stderr=stream
        )
    try:
        for number in (1, 2, 3):
            wait_until(lambda n=number: log.read_text().count("app shop") == n, 30, "it starts")
            (answer,) = tour(system, f"send shop.add --args [1,{number}] --wait --timeout 60s")
            assert answer[:2] == [0, f"{number + 1}\n"], log.read_text()
            assert worker.poll() is None, "the command that was given still runs"
            (folder / "shop.py").write_text(f"{SHOP}# {number}\n")
        wait_until(lambda: log.read_text().count("app shop") == 4, 30, "it starts")
    finally:
        worker.kill()
        worker.wait()
    nothing_is_left(folder)


FLOW = """
import asyncio
import sys

from aztask import App, Context

app = App("flow", broker="local://", results="local://")


@app.task_with_context
async def order(context: Context, mode: str) -> str:
    context.step("charge", len, mode)
    if mode == "connects" and "aztask.operate.stepcheck" in sys.orig_argv:
        await asyncio.open_connection("127.0.0.1", 9)
    return context.wait_for("approved")
"""
CHECKING = """
from aztask.app.loading import load_app
from aztask.operate.stepcheck import check, open_tasks

app = load_app("flow:app")
with app.inline():
    for mode in ("waits", "connects"):
        app.tasks["flow.order"].delay(mode)
    for each in check("flow:app", open_tasks(app, 10)):
        print(each.end, each.text)
"""


@pytest.mark.parametrize("system", SYSTEMS)
def test_open_steps_of_a_coroutine_are_checked(system, folder, lacking):
    """Its event loop needs a pair of sockets, on Windows a connection; the task gets no other."""
    (folder / "flow.py").write_text(FLOW)
    (folder / "checking.py").write_text(CHECKING)
    ended = run([sys.executable, "checking.py"], folder, lacking(system))
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout.count("fits it waits for signal approved") == 1, ended.stdout
    refused = "fails OSError: aztask steps --check has no network"
    assert ended.stdout.count(refused) == 1, ended.stdout
