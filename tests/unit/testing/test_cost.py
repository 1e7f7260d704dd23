"""What tests of tasks cost, in processor time: a busy machine changes that least.

`benchmarks/fixtures.py --check` measures the time that passes, on a quiet machine.
"""

import os
import time
from pathlib import Path

from aztask import App
from aztask.testing import background_worker

APP = """
from aztask import App

app = App("cheap", broker="local://")

@app.task
def add(a, b):
    return a + b
"""


def test_a_hundred_tests_in_inline_mode_take_less_than_a_second():
    app = App("shop")

    @app.task
    def add(a, b):
        return a + b

    before = time.process_time()
    for number in range(100):
        with app.inline():
            assert add.delay(number, 1).get() == number + 1
    assert time.process_time() - before < 1.0


def test_a_worker_in_the_background_is_ready_within_a_second(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(str(tmp_path))
    (tmp_path / "cheap_app.py").write_text(APP)
    app = App("cheap")
    with background_worker(app, "cheap_app:app", tmp_path) as worker:
        stat = Path(f"/proc/{worker.process.pid}/stat").read_text().rpartition(")")[2].split()
        ticks = sum(map(int, stat[11:13]))
        assert app.send("cheap.add", [1, 2]).get(timeout=30) == 3
    assert ticks / os.sysconf("SC_CLK_TCK") < 1.0
