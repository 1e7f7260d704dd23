"""The examples do what they say, with real workers."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.fixture
def run(tmp_path):
    """Run Python with arguments in an empty directory, as a reader of the examples would."""

    def run(*arguments, **environment):
        return subprocess.run(
            [sys.executable, *arguments],
            cwd=tmp_path,
            env={
                **os.environ,
                "PYTHONPATH": f"{ROOT / 'examples'}{os.pathsep}{ROOT}",
                **environment,
            },
            check=False,
            capture_output=True,
            text=True,
            timeout=120,
        )

    return run


def test_each_order_is_booked_once(run):
    """A worker is killed after a booking and before it was recorded; each order is sent twice."""
    script = str(ROOT / "examples" / "booking.py")
    worker = ("-m", "aztask", "-A", "booking:app", "worker", "--burst", "--lease", "1s")
    assert run(script, "20").returncode == 0
    assert run(*worker, AZTASK_FAILPOINT="ran:KILL").returncode == -signal.SIGKILL
    assert run(script, "20").returncode == 0
    last = run(*worker)
    assert last.returncode == 0, last.stderr
    shown = run(script)
    assert sorted(shown.stdout.splitlines()) == sorted(
        f"order-{number}: {number % 4} articles" for number in range(20)
    )


def test_files_are_imported_without_tasks(run):
    script = str(ROOT / "examples" / "importing.py")
    assert run(script, "send", "3").returncode == 0
    done = run(script)
    assert done.returncode == 0, done.stderr
    assert sorted(done.stdout.splitlines()) == [f"imported {n}.csv: 4 pages" for n in range(3)]
    queue = ("from importing import app; print(app.broker.stats('imports'))",)
    left = run("-c", *queue).stdout
    assert "active=0, leased=0, scheduled=0, deferred=0, dead=1" in left


def test_cards_are_encrypted_and_read_with_the_key_alone(run, tmp_path):
    script = str(ROOT / "examples" / "encrypted.py")
    for step in ("keys", "send"):
        done = run(script, step)
        assert done.returncode == 0, done.stderr
    worker = run("-m", "aztask", "-A", "encrypted:app", "worker", "--burst")
    assert worker.returncode == 0, worker.stderr
    assert "ValueError at encrypted.py:" in worker.stderr
    look, results = run(script, "look"), run(script, "results")
    assert "order-1 succeeded: the value: it is encrypted with the key" in look.stdout
    assert "order-2 failed: ValueError: (encrypted" in look.stdout
    assert "order-1 12.50 from 4111-1111-1111-1111" in results.stdout
    assert "order-2 failed: ValueError: the card 4000-0000-0000-0002 was refused" in results.stdout
    for path in tmp_path.rglob("*"):
        assert path.is_dir() or b"4111-1111" not in path.read_bytes(), path
    assert "4000-0000" not in worker.stderr + worker.stdout + look.stdout + look.stderr
