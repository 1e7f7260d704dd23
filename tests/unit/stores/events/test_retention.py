"""Old event files are deleted, and nothing else."""

from __future__ import annotations

import logging
import os
from pathlib import Path

import pytest

from aztask.stores.events.retention import mark_of, remove_old

# 2026-01-02 and three days later
OLD, NEW = 1_767_312_000.0, 1_767_571_200.0
BETWEEN = 1_767_484_800.0


def file(directory: Path, name: str, at: float = OLD) -> Path:
    path = directory / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("{}\n")
    os.utime(path, (at, at))
    return path


def left(directory: Path) -> list[str]:
    return sorted(p.relative_to(directory).as_posix() for p in directory.rglob("*") if p.is_file())


def test_old_files_and_empty_directories_are_deleted(tmp_path: Path) -> None:
    file(tmp_path, "date=2026-01-02/hour=03/w-1.jsonl")
    file(tmp_path, "date=2026-01-02/hour=04/w-2.jsonl")
    file(tmp_path, "date=2026-01-03/hour=05/w-3.jsonl")
    file(tmp_path, "date=2026-01-03/hour=05/w-4.jsonl", NEW)
    assert remove_old(tmp_path, BETWEEN, uploaded_only=False) == 3
    assert left(tmp_path) == ["date=2026-01-03/hour=05/w-4.jsonl"]
    assert [path.name for path in tmp_path.iterdir()] == ["date=2026-01-03"]
    assert remove_old(tmp_path, BETWEEN, uploaded_only=False) == 0


def test_what_is_no_closed_event_file_stays(tmp_path: Path) -> None:
    names = [
        ".2026-01-02T03.w-1.jsonl",
        "notes.txt",
        "date=2026-01-02/hour=03/.hidden.jsonl",
        "date=2026-01-02/hour=03/_part.jsonl",
        "date=2026-01-02/hour=03/part.parquet",
        "date=2026-01-02/w-2.jsonl",
    ]
    for name in names:
        file(tmp_path, name)
    outside = file(tmp_path, "elsewhere.jsonl")
    (tmp_path / "date=2026-01-02/hour=03/link.jsonl").symlink_to(outside)
    os.utime(tmp_path / "date=2026-01-02/hour=03/link.jsonl", (OLD, OLD), follow_symlinks=False)
    assert remove_old(tmp_path, BETWEEN, uploaded_only=False) == 0
    assert outside.exists()


def test_files_that_wait_for_their_upload_stay(tmp_path: Path) -> None:
    waiting = file(tmp_path, "date=2026-01-02/hour=03/w-1.jsonl")
    kept = file(tmp_path, "date=2026-01-02/hour=03/w-2.jsonl")
    mark_of(kept).touch()
    assert remove_old(tmp_path, BETWEEN, uploaded_only=True) == 1
    assert left(tmp_path) == [waiting.relative_to(tmp_path).as_posix()]


def test_a_file_that_cannot_be_deleted_does_not_keep_the_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    for number in range(3):
        file(tmp_path, f"date=2026-01-02/hour=03/w-{number}.jsonl")
    unlink = Path.unlink

    def refuse(path: Path, missing_ok: bool = False) -> None:
        if path.name == "w-1.jsonl":
            raise PermissionError(13, "Permission denied")
        unlink(path, missing_ok)

    monkeypatch.setattr(Path, "unlink", refuse)
    with caplog.at_level(logging.INFO):
        assert remove_old(tmp_path, BETWEEN, uploaded_only=False) == 2
    assert "w-1.jsonl: Permission denied" in caplog.text
    assert "deleted 2 old event files (6 bytes)" in caplog.text


def test_a_directory_that_does_not_exist(tmp_path: Path) -> None:
    assert remove_old(tmp_path / "none", BETWEEN, uploaded_only=False) == 0
