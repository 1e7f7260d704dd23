"""The command line as processes: signals, closed streams, logs, restarts, crashes."""

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from harness import ROOT, wait_until

SHOP = """
import logging, os, time
from aztask import App, RetryPolicy
app = App("shop", broker="local://", results="local://", retry=RetryPolicy(max_retries=0))

@app.task
def add(a, b):
    logging.getLogger("shop").warning("adding")
    return a + b

@app.task
def fail(text):
    raise ValueError(text)

@app.task
def nap(seconds):
    open("napping", "w").close()
    time.sleep(seconds)
    return "rested"

@app.task
def die():
    os._exit(3)

@app.task
def version():
    return 1

@app.task
def wait_for_child(seconds):
    return add.delay(1, 2).get(timeout=seconds)
"""


LIMITS = """
import time
from aztask import App, RetryPolicy
retry = RetryPolicy(max_retries=1, delay=0.1, jitter=False)
app = App("limits", broker="local://", results="local://", retry=retry)

@app.task({limit}=0.3)
def nap():
    time.sleep(30)
"""

FULL = Path("/dev/full")


class Folder:
    """A folder with an app, and commands that run in it."""

    def __init__(self, path):
        self.path: Path = path
        self.started = []
        (path / "shop.py").write_text(SHOP)
        kept = {name: value for name, value in os.environ.items() if not name.startswith("AZTASK_")}
        self.environment = {**kept, "PYTHONPATH": str(ROOT), "AZTASK_APP": "shop"}

    def start(self, *arguments, **options):
        given = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True, **options}
        environment = {**self.environment, **given.pop("environment", {})}
        process = subprocess.Popen(
            [sys.executable, "-m", "aztask", *arguments],
            cwd=self.path,
            env=environment,
            stdin=subprocess.DEVNULL,
            **given,
        )
        self.started.append(process)
        return process

    def run(self, *arguments, **options):
        """(exit code, stdout, stderr) of a command that ends by itself."""
        process = self.start(*arguments, **options)
        out, err = process.communicate(timeout=60)
        return process.returncode, out, err

    def states(self):
        return {
            line["worker"]: line["state"]
            for line in map(json.loads, self.run("workers", "--json")[1].splitlines())
        }

    def close(self):
        for process in self.started:
            if process.poll() is None:
                process.kill()
            process.wait()
            for stream in (process.stdout, process.stderr):
                if stream is not None:
                    stream.close()


@pytest.fixture
def folder(tmp_path):
    made = Folder(tmp_path)
    yield made
    made.close()


def one_line(err):
    (line,) = err.splitlines()
    assert line.startswith("aztask: error: ")
    return line


class TestWork:
    def test_send_work_and_read(self, folder):
        code, out, _ = folder.run("send", "shop.add", "--args", "[1, 2]", "--task-id", "sum")
        assert (code, out) == (0, "sum\n")
        folder.run("send", "shop.fail", "--args", '["boom"]', "--task-id", "bad")
        code, out, err = folder.run("worker", "--burst", "-c", "2", "--name", "me")
        assert (code, out) == (0, "")
        assert "worker me: 2 processes, queues default, broker local://, lease 60 s" in err
        assert "app shop (shop), 6 tasks: shop.add, shop.die, shop.fail, shop.nap, shop.ver" in err
        assert "task shop.add sum succeeded in 0." in err
        assert "task shop.fail bad failed, dead-lettered: retries-exhausted: ValueError: b" in err
        trace = err.partition("Traceback")[2].splitlines()
        assert trace[1].endswith('shop.py", line 13, in fail'), "it begins in the user's code"
        assert "worker me stopped: 1 succeeded, 1 failed, 0 retrying, 1 dead-lettered" in err
        assert "[sum] adding" in err
        assert json.loads(folder.run("result", "sum", "--json")[1])["value"] == 3
        assert "ValueError: boom" in folder.run("result", "bad")[1]
        assert folder.states() == {"me": "stopped"}

    def test_json_logs_are_one_object_per_line_with_task_ids(self, folder):
        folder.run("send", "shop.add", "--args", "[1, 2]", "--task-id", "sum")
        folder.run("send", "shop.fail", "--args", '["boom"]', "--task-id", "bad")
        worker = ("worker", "--burst", "-c", "1", "--log-format", "json", "--pool", "threads")
        code, _, err = folder.run(*worker)
        records = [json.loads(line) for line in err.splitlines()]
        assert code == 0
        (added,) = [record for record in records if record["logger"] == "shop"]
        assert (added["task_id"], added["task"], added["message"]) == ("sum", "shop.add", "adding")
        assert any("ValueError: boom" in record.get("error", "") for record in records)

    def test_the_log_can_be_limited_to_what_went_wrong(self, folder):
        for task in ("add", "fail"):
            arguments = '["a", "b"]' if task == "add" else '["boom"]'
            folder.run("send", f"shop.{task}", "--args", arguments, "--task-id", task)
        given = ("worker", "--burst", "-c", "1", "--log-level", "warning")
        err = folder.run(*given)[2]
        assert "task shop.fail fail failed, dead-lettered" in err
        assert " INFO " not in err
        folder.run("send", "shop.add", "--args", "[1, 2]")
        err = folder.run("worker", "--burst", "-c", "1", "--log-tasks", "off")[2]
        assert "adding" in err
        assert "succeeded in" not in err

    def test_a_crash_names_its_task_and_what_follows(self, folder):
        folder.run("send", "shop.die", "--task-id", "dead")
        err = folder.run("worker", "--burst", "-c", "1")[2]
        (line,) = [line for line in err.splitlines() if "dead failed" in line]
        assert "task shop.die dead failed, dead-lettered: retries-exhausted: WorkerCrashed" in line

    @pytest.mark.parametrize("limit", ["time_limit", "soft_time_limit"])
    def test_a_time_limit_names_its_task_and_what_follows(self, folder, limit):
        (folder.path / "limits.py").write_text(LIMITS.format(limit=limit))
        folder.run("-A", "limits", "send", "limits.nap", "--task-id", "long")
        err = folder.run("-A", "limits", "worker", "--burst", "-c", "1")[2]
        lines = [line for line in err.splitlines() if "task limits.nap long failed" in line]
        assert "retry 1 of 1 in 0.1" in lines[0]
        assert "dead-lettered: retries-exhausted" in lines[1]
        assert all("TimeLimitExceeded" in line for line in lines), lines

    def test_wait_prints_the_value(self, folder):
        folder.start("worker", "-c", "1", stderr=subprocess.DEVNULL)
        given = ("--task-id", "a", "--wait")
        code, out, err = folder.run("send", "shop.add", "--args", "[1, 2]", *given)
        assert (code, out, err) == (0, "3\n", "a\n")
        given = ("--task-id", "b", "--wait")
        code, out, err = folder.run("send", "shop.fail", "--args", '["x"]', *given)
        assert (code, out) == (1, "")
        assert err == "b\naztask: error: task b failed: ValueError: x\n"

    def test_what_runs_is_seen_while_it_runs_and_after_its_worker_was_killed(self, folder):
        for task_id in ("long", "next"):
            folder.run("send", "shop.nap", "--args", "[60]", "--task-id", task_id)

        def running():
            return [json.loads(line) for line in folder.run("running", "--json")[1].splitlines()]

        worker = folder.start(
            "worker",
            "-c",
            "1",
            "--name",
            "me",
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        wait_until(running, 20, "a sign of life while it runs")
        (found,) = running()
        assert (found["id"], found["task"], found["worker"]) == ("long", "shop.nap", "me")
        assert found["state"] == "alive"
        assert 0 < found["running_seconds"] < 30
        (told,) = map(json.loads, folder.run("workers", "--json")[1].splitlines())
        assert (told["running"], told["leased"]) == (1, 2)
        worker.kill()
        worker.wait()
        assert [each["id"] for each in running()] == ["long"]

    def test_dead_letters_are_replayed_and_run_again(self, folder):
        folder.run("send", "shop.fail", "--args", '["boom"]', "--task-id", "bad")
        folder.run("worker", "--burst", "-c", "1")
        code, out, _ = folder.run("dlq", "replay", "--all", "--yes")
        assert (code, out) == (0, "replayed 1 dead letter\n")
        folder.run("worker", "--burst", "-c", "1")
        runs = json.loads(folder.run("result", "bad", "--json")[1])["runs"]
        assert [(run["generation"], run["state"]) for run in runs] == [(0, "failed"), (1, "failed")]
        (letter,) = map(json.loads, folder.run("dlq", "list", "--json")[1].splitlines())
        assert (letter["id"], letter["generation"]) == ("bad", 1)

    @pytest.mark.parametrize("options", [["--max-tasks", "2"], ["--burst"]])
    def test_it_ends_by_itself(self, folder, options):
        for number in range(3):
            folder.run("send", "shop.add", "--args", f"[{number}, 1]")
        code, _, err = folder.run("worker", "-c", "1", *options)
        assert code == 0
        assert ("2 succeeded" if "--max-tasks" in options else "3 succeeded") in err


class TestSignals:
    @pytest.fixture
    def napping(self, folder):
        """A worker that runs a task."""

        def start(seconds, *options):
            arguments = ("--args", f"[{seconds}]", "--task-id", "nap")
            assert folder.run("send", "shop.nap", *arguments)[0] == 0
            worker = folder.start("worker", "-c", "1", "--name", "me", *options)
            wait_until((folder.path / "napping").exists, 20, "the task runs")
            return worker

        return start

    @pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
    def test_one_signal_lets_running_tasks_end(self, folder, napping, number):
        worker = napping(1)
        worker.send_signal(number)
        _, err = worker.communicate(timeout=30)
        assert worker.returncode == 0
        assert "worker me stopped: 1 succeeded" in err
        assert "Traceback" not in err
        assert "stopping: waiting up to 30 s for 1 running task; press Ctrl-C" in err

    @pytest.mark.parametrize("numbers", [(signal.SIGTERM, signal.SIGHUP), (signal.SIGQUIT,)])
    def test_a_second_signal_or_sigquit_gives_everything_back_now(self, folder, napping, numbers):
        worker = napping(60)
        for number in numbers:
            worker.send_signal(number)
            time.sleep(0.2)
        _, err = worker.communicate(timeout=20)
        assert worker.returncode == 0
        assert "worker me stopped: 0 succeeded" in err
        assert "gave back 1 running task(s), any worker runs them again: task shop.nap nap" in err
        (stats,) = map(json.loads, folder.run("queues", "--json")[1].splitlines())
        assert (stats["active"], stats["leased"]) == (1, 0)
        given_back = json.loads(folder.run("result", "nap", "--json")[1])
        assert (given_back["state"], given_back["starts"]) == ("pending", 0)

    def test_the_timeout_does_the_same(self, folder, napping):
        worker = napping(60, "--shutdown-timeout", "200ms")
        worker.send_signal(signal.SIGTERM)
        worker.communicate(timeout=20)
        assert worker.returncode == 0

    def test_ctrl_c_while_waiting_is_quiet(self, folder):
        waiting = folder.start("send", "shop.add", "--args", "[1, 2]", "--wait")
        assert waiting.stderr.readline().strip()  # its id: it is sent
        waiting.send_signal(signal.SIGINT)
        out, err = waiting.communicate(timeout=20)
        assert (waiting.returncode, out, err.strip()) == (130, "", "")


@pytest.mark.parametrize("pool", ["processes", "threads"])
@pytest.mark.parametrize(("slots", "told"), [("1", True), ("2", False)])
def test_a_task_that_waits_for_its_child_in_the_only_slot_is_told_so(folder, pool, slots, told):
    folder.run("send", "shop.wait_for_child", "--args", "[1]", "--task-id", "parent")
    code, _, err = folder.run("worker", "--burst", "-c", slots, "--pool", pool)
    assert code == 0
    assert ("its worker runs one task at a time: only another worker can run it" in err) is told
    state = json.loads(folder.run("result", "parent", "--json")[1])["state"]
    assert state == ("failed" if told else "succeeded")


class TestReload:
    @pytest.fixture
    def reloading(self, folder):
        """Starts a worker that reloads; returns its process and what its log says by now."""
        log = folder.path / "log"

        def start(*options):
            with log.open("wb") as stream:
                worker = folder.start(
                    "worker", "-c", "1", "--reload", *options, stdout=stream, stderr=stream
                )
            wait_until(lambda: "queues default" in log.read_text(), 20, "the worker starts")
            return worker, log.read_text

        return start

    def test_a_task_that_runs_during_the_change_ends_once(self, folder, reloading):
        worker, log = reloading()
        napping = folder.start("send", "shop.nap", "--args", "[2]", "--wait", "--timeout", "60s")
        wait_until((folder.path / "napping").exists, 20, "the task runs")
        (folder.path / "shop.py").write_text(SHOP.replace("return 1", "return 2"))
        wait_until(lambda: log().count("queues default") == 2, 30, "the worker restarts")
        out, err = napping.communicate(timeout=60)
        assert out == '"rested"\n'
        (line,) = folder.run("result", "--json", err.strip())[1].splitlines()
        (run,) = json.loads(line)["runs"]
        assert (run["state"], run["starts"]) == ("succeeded", 1)
        worker.terminate()
        assert worker.wait(20) == 0

    def test_a_task_that_outlasts_the_drain_runs_again_in_the_new_worker(self, folder, reloading):
        worker, log = reloading("--shutdown-timeout", "500ms")
        napping = folder.start("send", "shop.nap", "--args", "[60]", "--wait", "--timeout", "60s")
        wait_until((folder.path / "napping").exists, 20, "the task runs")
        (folder.path / "shop.py").write_text(SHOP.replace("time.sleep(seconds)", "pass"))
        out, _ = napping.communicate(timeout=60)
        assert out == '"rested"\n'
        assert log().count("queues default") == 2
        worker.terminate()
        assert worker.wait(20) == 0

    def test_a_changed_source_starts_the_worker_anew(self, folder):
        without_app = {"AZTASK_APP": "", "AZTASK_BROKER": "local://", "AZTASK_RESULTS": "local://"}
        log = folder.path / "log"
        with log.open("wb") as stream:
            worker = folder.start("worker", "-c", "1", "--reload", stdout=stream, stderr=stream)
        wait_until(lambda: "queues default" in log.read_text(), 20, "the worker starts")
        send = ("send", "shop.version", "--wait", "--timeout", "30s")
        assert folder.run(*send)[1] == "1\n"
        source = folder.path / "shop.py"
        source.write_text("def (")
        wait_until(lambda: "does not compile" in log.read_text(), 20, "the mistake is seen")
        assert folder.run(*send, environment=without_app)[1] == "1\n"
        source.write_text(SHOP.replace("return 1", "return 2"))
        wait_until(lambda: log.read_text().count("queues default") == 2, 30, "it starts anew")
        assert folder.run(*send)[1] == "2\n"
        assert worker.poll() is None
        worker.terminate()
        assert worker.wait(20) == 0


@pytest.mark.parametrize(
    ("given", "code", "words"),
    [
        (["-Q", "../x"], 4, "'../x' cannot name a queue"),
        (["-Q", "x" * 64], 4, "cannot name a queue"),
        (["-Q", "Upper"], 4, "cannot name a queue"),
        (["-Q", "a\nb"], 4, "cannot name a queue"),
        (["-Q", "\x1b[31m"], 4, "cannot name a queue"),
        (["-c", "0"], 2, "is not in the range"),
        (["--lease", "10s", "--max-lease", "5s"], 4, "must be longer than"),
        (["-A", "nosuch"], 2, "there is no module 'nosuch'"),
        (["-A", "memory"], 4, "is visible to one process only"),
    ],
    ids=range(9),
)
def test_a_worker_that_cannot_start_says_why(folder, given, code, words):
    (folder.path / "memory.py").write_text(
        "from aztask import App\napp = App('x', broker='local://:memory:')\n"
    )
    ended = folder.run("worker", *given)
    assert ended[:2] == (code, "")
    assert words in one_line(ended[2])


class TestStreams:
    @pytest.fixture
    def filled(self, folder):
        names = [f"queue-{number}-{'x' * 40}" for number in range(300)]
        assert folder.run("queues", "create", *names)[0] == 0
        return folder

    def test_a_reader_that_goes_away_is_no_news(self, filled):
        read, write = os.pipe()
        os.close(read)
        process = filled.start("queues", "--json", stdout=write)
        os.close(write)
        _, err = process.communicate(timeout=30)
        assert (process.returncode, err) == (1, "")

    @pytest.mark.parametrize("arguments", [["queues"], ["--help"], ["dlq", "list"], ["send", "x"]])
    def test_a_closed_stdout_is_no_traceback(self, folder, arguments):
        folder.run("queues", "create", "default")
        process = folder.start(*arguments, stdout=None, preexec_fn=lambda: os.close(1))
        _, err = process.communicate(timeout=30)
        if arguments == ["--help"]:
            assert (process.returncode, err) == (0, "")
        else:
            assert process.returncode == 1
            assert one_line(err).startswith("aztask: error: stdout is closed, so nothing was done")

    @pytest.mark.skipif(not FULL.exists(), reason="needs /dev/full")
    @pytest.mark.parametrize("arguments", [["queues"], ["--help"]])
    def test_a_full_disk_behind_stdout_is_one_line(self, folder, arguments):
        folder.run("queues", "create", "default")
        with FULL.open("w") as full:
            process = folder.start(*arguments, stdout=full)
            _, err = process.communicate(timeout=30)
        assert process.returncode == 1
        assert one_line(err) == "aztask: error: No space left on device"

    def test_a_plain_locale_can_show_everything(self, folder):
        (folder.path / "odd.py").write_text(
            "from aztask import App\napp = App('x')\n@app.task\ndef ü(a='…'): 'ß'\n"
        )
        environment = {"PYTHONIOENCODING": "ascii", "PYTHONUTF8": "0"}
        code, out, _ = folder.run("tasks", "-A", "odd", environment=environment)
        assert code == 0
        assert "x.ü" in out or "x.\\xfc" in out


@contextlib.contextmanager
def read_only(path):
    """Nobody can write there: by its mode, or, for root, by a read-only mount."""
    if os.geteuid():
        path.chmod(0o555)
        yield
        path.chmod(0o755)
        return
    for options in (["--bind", str(path), str(path)], ["-o", "remount,ro,bind", str(path)]):
        done = subprocess.run(["mount", *options], capture_output=True, text=True, check=False)
        if done.returncode:
            pytest.fail(f"as root this test needs to mount: {done.stderr.strip()}", False)
    try:
        yield
    finally:
        subprocess.run(["umount", str(path)], check=True)


def test_a_read_only_folder_is_one_line(folder):
    with read_only(folder.path):
        code, _, err = folder.run("send", "shop.add", "--args", "[1, 2]")
    assert code == 4
    assert one_line(err)


def test_a_folder_that_takes_no_files_is_one_line(folder):
    address = "local:///proc/self/nothing/queues.db"
    environment = {"AZTASK_APP": "", "AZTASK_BROKER": address}
    code, out, err = folder.run("send", "shop.resize", environment=environment)
    assert (code, out) == (4, "")
    assert "choose a writable place" in one_line(err)


CRASHING = """
import os, sys
from aztask import App
from aztask.operate.deadletters.view import DeadLetters, Selection
from aztask.settlement import Complete
from aztask.operate.deadletters.sweep import Sweep

settle = Sweep._settle

def die_at_completion(self, leases, how):
    if isinstance(how, Complete):
        os._exit(9)
    return settle(self, leases, how)

Sweep._settle = die_at_completion
app = App("shop", broker=sys.argv[1], results=sys.argv[2])
DeadLetters(app, "default").replay(Selection(everything=True))
"""


@pytest.mark.kills
@pytest.mark.parametrize("results", ["queues.db", "results.db"])
def test_a_replay_that_dies_before_the_completion_runs_the_task_once(folder, results):
    """In one file nothing was sent; in two the second replay makes the same message again."""
    broker = f"local://{folder.path}/.aztask/queues.db"
    store = f"local://{folder.path}/.aztask/{results}"
    source = SHOP.replace('results="local://"', f"results={store!r}")
    (folder.path / "shop.py").write_text(source)
    folder.run("send", "shop.fail", "--args", '["boom"]', "--task-id", "bad")
    folder.run("worker", "--burst", "-c", "1")
    (folder.path / "crash.py").write_text(CRASHING)
    crashed = subprocess.run(
        [sys.executable, "crash.py", broker, store],
        cwd=folder.path,
        env=folder.environment,
        check=False,
    )
    assert crashed.returncode == 9
    (stats,) = map(json.loads, folder.run("queues", "--json")[1].splitlines())
    assert stats["active"] == (0 if results == "queues.db" else 1)
    assert stats["dead"] + stats["leased"] >= 1

    def replayed():
        return folder.run("dlq", "replay", "--all", "--yes")[0] == 0

    wait_until(replayed, 30, "the dead replay's lease ends")
    folder.run("worker", "--burst", "-c", "1")
    runs = json.loads(folder.run("result", "bad", "--json")[1])["runs"]
    assert [(run["generation"], run["starts"]) for run in runs] == [(0, 1), (1, 1)]
