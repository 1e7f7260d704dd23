"""Draws every picture of the documentation.

Usage: python docs/pictures/draw.py

Each module beside this one that has a function ``draw`` becomes an SVG file of its name. A test
compares the files with what this would write.
"""

from __future__ import annotations

from pathlib import Path

import lease
import packages
import pipeline
import sessions
import shutdown
import spark
import strategies
import task_path
import worker
import workflow_crashes

HERE = Path(__file__).parent
PICTURES = (
    worker,
    task_path,
    packages,
    lease,
    pipeline,
    sessions,
    shutdown,
    strategies,
    spark,
    workflow_crashes,
)


def drawn() -> dict[Path, str]:
    """{file: its text} of all pictures."""
    files = {}
    for module in PICTURES:
        name = module.__name__.rpartition(".")[2].replace("_", "-")
        files[HERE / f"{name}.svg"] = module.draw().svg()
    return files


if __name__ == "__main__":
    for path, text in drawn().items():
        path.write_text(text, encoding="utf-8")
