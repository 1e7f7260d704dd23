"""The developer's way to start Azurite, on a machine that cannot."""

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_without_node_one_line_says_what_to_install(tmp_path):
    ended = subprocess.run(
        [sys.executable, "-m", "tests.azurite"],
        cwd=ROOT,
        env={**os.environ, "PATH": str(tmp_path), "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=30,
        check=False,
    )
    assert ended.returncode == 1
    assert ended.stdout == ""
    (line,) = ended.stderr.splitlines()
    assert "node is not installed" in line
    assert "install nodejs" in line
