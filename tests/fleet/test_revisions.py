"""The revisions that fleets are made of are in the history of this branch, so a clone has them."""

from __future__ import annotations

import subprocess
from pathlib import Path

import previous
import pytest

NAMED = {
    name: value
    for name, value in vars(previous).items()
    if isinstance(value, str) and len(value) == 40 and value.isalnum()
}


def is_past_of(revision: str, branch: str, repository: Path = previous.ROOT) -> bool:
    """Whether a clone of the branch has the revision."""
    command = ["git", "merge-base", "--is-ancestor", revision, branch]
    done = subprocess.run(command, cwd=repository, capture_output=True, check=False)
    return done.returncode == 0


@pytest.mark.parametrize("name", sorted(NAMED))
def test_a_clone_has_the_revision(name: str) -> None:
    assert is_past_of(NAMED[name], "HEAD"), f"{name}: no clone has it, or this one is shallow"


def test_a_revision_of_another_branch_is_not_past(tmp_path: Path) -> None:
    def git(*arguments: str) -> str:
        who = ["-c", "user.name=t", "-c", "user.email=t@example.org"]
        command = ["git", *who, *arguments]
        return subprocess.check_output(command, cwd=tmp_path, text=True).strip()

    git("init", "-q")
    git("commit", "-q", "--allow-empty", "-m", "first")
    first = git("rev-parse", "HEAD")
    git("commit", "-q", "--allow-empty", "-m", "of no branch")
    other = git("rev-parse", "HEAD")
    git("reset", "-q", "--hard", first)
    git("commit", "-q", "--allow-empty", "-m", "second")
    assert is_past_of(first, "HEAD", tmp_path) and not is_past_of(other, "HEAD", tmp_path)
    assert len(NAMED) >= 7
