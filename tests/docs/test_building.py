"""The documentation builds without a warning."""

import subprocess
import sys
from pathlib import Path

DOCS = Path(__file__).parents[2] / "docs"


def build(source, folder):
    """Sphinx's exit code and what it said."""
    command = [sys.executable, "-m", "sphinx", "-W", "--keep-going", "-q", "-b", "html"]
    command += ["-d", folder / "doctrees", source, folder / "html"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    return done.returncode, done.stdout + done.stderr


def test_the_documentation_builds_without_a_warning(tmp_path):
    code, said = build(DOCS, tmp_path)
    assert (code, said) == (0, "")
    assert (tmp_path / "html" / "index.html").is_file()


def test_a_warning_is_a_failure(tmp_path):
    source = tmp_path / "source"
    source.mkdir()
    (source / "conf.py").write_text("")
    (source / "index.rst").write_text("A page\n======\n\n:doc:`nowhere`\n")
    code, said = build(source, tmp_path)
    assert code == 1
    assert "unknown document" in said
