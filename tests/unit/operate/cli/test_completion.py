import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[4]


@pytest.fixture
def environment(tmp_path):
    """A PATH whose first program is aztask."""
    program = tmp_path / "aztask"
    program.write_text(f'#!/bin/sh\nexec {sys.executable} -m aztask "$@"\n')
    program.chmod(0o755)
    path = f"{tmp_path}{os.pathsep}{os.environ['PATH']}"
    return {**os.environ, "PATH": path, "PYTHONPATH": str(ROOT)}


@pytest.mark.skipif(shutil.which("bash") is None, reason="needs bash")
@pytest.mark.parametrize(
    ("words", "found"),
    [
        ("aztask que", "queues"),
        ("aztask queues p", "peek purge"),
        ("aztask worker --concu", "--concurrency"),
        ("aztask worker --pool t", "threads"),
    ],
)
def test_bash_completes(environment, words, found):
    script = (
        'eval "$(aztask completion bash)"; '
        f"COMP_WORDS=({words}); COMP_CWORD=$((${{#COMP_WORDS[@]}} - 1)); "
        '_aztask_completion aztask; echo "${COMPREPLY[@]}"'
    )
    ended = subprocess.run(
        ["bash", "-c", script], env=environment, check=True, capture_output=True, text=True
    )
    assert (ended.stdout, ended.stderr) == (f"{found}\n", "")


@pytest.mark.parametrize(
    ("shell", "first"),
    [("bash", "_aztask_completion() {"), ("zsh", "#compdef aztask"), ("fish", "function _aztask")],
)
def test_the_script_of_each_shell(cli, monkeypatch, shell, first):
    ended = cli("completion", shell)
    assert (ended.code, ended.err) == (0, "")
    assert ended.out.startswith(first)
    monkeypatch.setenv("SHELL", f"/usr/bin/{shell}")
    assert cli("completion").out == ended.out


def test_an_unknown_shell_is_a_usage_error(cli, monkeypatch):
    monkeypatch.setenv("SHELL", "/bin/sh")
    ended = cli("completion")
    assert ended.code == 2
    assert ended.error.startswith("name the shell: aztask completion bash or zsh or fish")
