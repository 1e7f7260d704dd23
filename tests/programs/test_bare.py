"""Where the system has no Node.js, Java or Chromium, the tests fetch them and pass."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from share import SHARE

ROOT = Path(__file__).parents[2]
HIDDEN = ("node", "npm", "npx", "java", "chromium", "google-chrome")
TESTS = {
    "Azurite": "tests/integration/test_storage_worker.py::test_what_an_idle_worker_costs",
    "the JavaScript SDK": "tests/emulator/test_javascript.py",
    "Spark": "tests/spark/test_session.py",
    "a page": "tests/spark/test_report_page.py::test_hostile_names_are_text",
}


@pytest.fixture(scope="module")
def bare_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a link to every program of the PATH, but for those that are hidden."""
    folder = tmp_path_factory.mktemp("bin")
    for each in os.environ["PATH"].split(os.pathsep):
        for program in Path(each).iterdir() if Path(each).is_dir() else ():
            link = folder / program.name
            if not program.name.startswith(HIDDEN) and not link.is_symlink():
                link.symlink_to(program)
    return folder


def npm_settings() -> dict[str, str]:
    """Where the system's npm, if there is one, keeps its registry and its certificates.

    npm looks beside its own program, so another one would miss what reaches the registry here.
    """
    npm = shutil.which("npm")
    if npm is None:
        return {}
    command = [npm, "config", "get", "globalconfig"]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    return {"npm_config_globalconfig": done.stdout.strip()}


@pytest.mark.timeout(600)
@pytest.mark.parametrize("what", TESTS)
def test_a_machine_without_the_programs(bare_path: Path, what: str) -> None:
    environment = {**os.environ, **npm_settings(), "PATH": str(bare_path)}
    environment.pop("JAVA_HOME", None)
    environment.pop(SHARE, None)  # the one test within is not drawn once more
    # The test within ends first, so that its traceback is part of what is shown.
    environment["PYTEST_TIMEOUT"] = "500"
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", TESTS[what]]
    done = subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout[-3000:]
    assert " passed" in done.stdout
    assert "skipped" not in done.stdout
