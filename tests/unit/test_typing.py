"""The public surface, as type checkers see it: right uses pass, wrong ones are found."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent.parent
USES = ROOT / "tests" / "typing" / "uses.py"


@pytest.mark.parametrize(
    "command",
    [
        ["-m", "mypy", "--strict", "--warn-unused-ignores", str(USES)],
        ["-m", "pyright", "-p", str(USES.parent), str(USES)],
    ],
    ids=["mypy", "pyright"],
)
def test_right_and_wrong_uses(command: list[str]) -> None:
    ended = subprocess.run(
        [sys.executable, *command], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert ended.returncode == 0, ended.stdout + ended.stderr


def test_the_marker_for_type_checkers_ships() -> None:
    assert (ROOT / "aztask" / "py.typed").exists()
    assert "aztask = py.typed" in (ROOT / "setup.cfg").read_text()
