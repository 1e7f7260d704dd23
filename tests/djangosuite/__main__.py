"""Downloads Django's tests, runs those of tasks, and compares the failures with `DIFFERENT`."""

import os
import re
import subprocess
import sys
import tarfile
import tempfile
from pathlib import Path

import django

ROOT = Path(__file__).parents[2]
BACKENDS = "tests.djangosuite.backends"
CHANGES = (
    ("django.tasks.backends.dummy.DummyBackend", f"{BACKENDS}.KeptBackend"),
    ("django.tasks.backends.immediate.ImmediateBackend", f"{BACKENDS}.InlineBackend"),
    (
        "from django.tasks.backends.dummy import DummyBackend",
        f"from {BACKENDS} import KeptBackend as DummyBackend",
    ),
    (
        "from django.tasks.backends.immediate import ImmediateBackend",
        f"from {BACKENDS} import InlineBackend as ImmediateBackend",
    ),
)
PRIORITY = "no queue service has priorities, so the backend refuses them"
OF_IMMEDIATE = "a limit of Django's immediate backend that this one does not have"
IN_MEMORY = "it changes what Django's backend keeps in memory; ours reads the result store"
DIFFERENT = {
    "test_tasks.test_using_priority": PRIORITY,
    "test_tasks.test_chained_using": PRIORITY,
    "test_tasks.test_invalid_priority": PRIORITY,
    "test_dummy_backend.test_refresh_result": IN_MEMORY,
    "test_dummy_backend.test_refresh_result_async": IN_MEMORY,
    "test_immediate_backend.test_cannot_get_result": OF_IMMEDIATE,
    "test_immediate_backend.test_cannot_refresh_result": OF_IMMEDIATE,
    "test_immediate_backend.test_cannot_pass_run_after": OF_IMMEDIATE,
}
NAMED = re.compile(r"^(?:ERROR|FAIL): (\w+) \([\w.]*\.(test_\w+)\.", re.MULTILINE)
COUNTED = re.compile(r"^Ran (\d+) tests", re.MULTILINE)


def main():
    if django.VERSION < (6,):
        sys.exit(f"Django {django.__version__} has no tests of tasks: install Django 6 or later")
    with tempfile.TemporaryDirectory() as folder:
        fetch(Path(folder))
        adapt(Path(folder) / "tasks")
        text = run(Path(folder))
    failed = {f"{module}.{name}" for name, module in NAMED.findall(text)}
    count = int(COUNTED.search(text)[1]) if COUNTED.search(text) else 0
    print(f"Django {django.__version__}: {count} tests, {len(failed)} fail")
    for name in sorted(failed & DIFFERENT.keys()):
        print(f"  as expected, {name}: {DIFFERENT[name]}")
    unexpected, mended = failed - DIFFERENT.keys(), DIFFERENT.keys() - failed
    if unexpected or mended or count < 60:
        print(text)
        sys.exit(f"failed: {sorted(unexpected)}; not failed: {sorted(mended)}; {count} tests ran")


def fetch(folder):
    """Put Django's ``tests/tasks`` into the folder."""
    words = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "--no-binary", "django"]
    subprocess.run([*words, "-d", str(folder), f"django=={django.__version__}"], check=True)
    (archive,) = folder.glob("[dD]jango-*.tar.gz")
    with tarfile.open(archive) as tar:
        for member in tar.getmembers():
            parts = member.name.split("/")
            if parts[1:3] == ["tests", "tasks"]:
                member.name = "/".join(parts[2:])
                tar.extract(member, folder, filter="data")


def adapt(tests):
    """Name our backends in the tests of what every backend must do."""
    for path in tests.glob("test_*.py"):
        if path.name == "test_custom_backend.py":  # a backend of the test's own
            continue
        text = path.read_text()
        for old, new in CHANGES:
            text = text.replace(old, new)
        path.write_text(text)


def run(folder):
    """Run them with Django's runner; returns its output."""
    environment = {
        **os.environ,
        "AZTASK_BROKER": f"local://{folder}/queues.db",
        "AZTASK_RESULTS": f"local://{folder}/queues.db",
        "DJANGO_SETTINGS_MODULE": "tests.djangosuite.settings",
        "PYTHONPATH": os.pathsep.join([str(folder), str(ROOT)]),
    }
    words = [sys.executable, "-m", "django", "test", "tasks", "-v", "0"]
    done = subprocess.run(
        words, cwd=folder, env=environment, capture_output=True, text=True, check=False
    )
    return done.stdout + done.stderr


if __name__ == "__main__":
    main()
