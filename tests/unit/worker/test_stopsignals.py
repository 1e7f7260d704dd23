"""The signals that end a worker, each in a real process."""

import os
import signal
import subprocess
import sys

import pytest

from aztask.worker.stopsignals import DRAIN, NOW

ALL = sorted({*DRAIN, *NOW})


def output_of(script, *, before=None):
    ended = subprocess.run(
        [sys.executable, "-c", script],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
        preexec_fn=before,
    )
    return ended.returncode, ended.stdout.split()


@pytest.mark.parametrize("number", ALL)
def test_in_the_pool_they_do_nothing_and_end_programs_as_usual(number):
    script = (
        "import os, subprocess\n"
        "from aztask.worker.stopsignals import leave_ending_to_worker\n"
        "leave_ending_to_worker()\n"
        f"os.kill(os.getpid(), {number:d})\n"
        "program = subprocess.Popen(['sleep', '60'])\n"
        f"program.send_signal({number:d})\n"
        "print(program.wait(30), flush=True)\n"
        "if (pid := os.fork()) == 0:\n"
        "    try:\n"
        f"        os.kill(os.getpid(), {number:d})\n"
        "    except KeyboardInterrupt:\n"
        "        os._exit(130)\n"
        "print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))\n"
    )
    forked = "130" if number == signal.SIGINT else f"-{number:d}"
    assert output_of(script) == (0, [f"-{number:d}", forked])


@pytest.mark.parametrize("number", ALL)
@pytest.mark.parametrize("installed", ["end_while_starting", "leave_ending_to_worker"])
def test_a_signal_that_was_ignored_stays_ignored(number, installed):
    script = (
        "import os, signal\n"
        f"from aztask.worker import stopsignals\n"
        f"stopsignals.{installed}()\n"
        f"os.kill(os.getpid(), {number:d})\n"
        f"print(signal.getsignal({number:d}) is signal.SIG_IGN)\n"
    )
    ignore = lambda: signal.signal(number, signal.SIG_IGN)  # noqa: E731
    assert output_of(script, before=ignore) == (0, ["True"])


@pytest.mark.parametrize("number", ALL)
def test_while_the_app_is_imported_they_end_the_process_at_once(number):
    script = (
        "import os, time\n"
        "from aztask.worker.stopsignals import end_while_starting\n"
        "end_while_starting()\n"
        "print('importing')\n"
        "try:\n"
        f"    os.kill(os.getpid(), {number:d}); time.sleep(30)\n"
        "except BaseException:\n"
        "    print('an app that catches everything')\n"
    )
    assert output_of(script) == (0, ["importing"])


@pytest.mark.parametrize("number", ALL)
def test_after_the_end_they_change_nothing_also_while_the_interpreter_ends(number):
    script = (
        "import os\n"
        "from aztask.worker import stopsignals\n"
        "class AtTheEnd:\n"
        "    def __init__(self): self.kill, self.pid = os.kill, os.getpid()\n"
        f"    def __del__(self): self.kill(self.pid, {number:d})\n"
        "stopsignals.end_while_starting()\n"
        "import builtins\n"
        "builtins.kept = AtTheEnd()  # freed when the handlers are gone\n"
        "stopsignals.ended()\n"
        "print('ended')\n"
    )
    assert output_of(script) == (0, ["ended"])


def test_every_signal_that_a_terminal_or_a_manager_sends_is_handled():
    assert set(ALL) == {signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT}
    assert os.name == "posix"
