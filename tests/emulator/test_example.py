"""The example folder runs as its README says."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_try_it():
    done = subprocess.run(
        [sys.executable, "try_it.py"],
        cwd=ROOT / "examples" / "emulator",
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    assert "dead letter: bad because: not an order" in done.stdout
