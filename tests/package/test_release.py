"""``tox -e release`` says what it tried, and its workflow is what GitHub takes.

The whole of it takes half an hour; here are its parts, with a small demo of their own.
"""

from __future__ import annotations

import importlib.util
import json
import re
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any
from zipfile import ZipFile

import pytest
import yaml

ROOT = Path(__file__).parents[2]
WORKFLOW = ROOT / ".github" / "workflows" / "release.yml"


def _release() -> ModuleType:
    spec = importlib.util.spec_from_file_location("release", ROOT / "release" / "release.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["release"] = module
    spec.loader.exec_module(module)
    return module


release = _release()
HERE = "{}.{}".format(*sys.version_info)

DEMO = """
import json, sys
print(json.dumps({{"tasks": 3, "succeeded": {succeeded}, "seconds": 1.0}}))
sys.exit({code})
"""


def package(folder: Path, succeeded: int = 3, code: int = 0) -> Path:
    """A wheel whose command `aztask` is a demo that ends like this."""
    info = "aztask-1.dist-info"
    files = {
        "aztask_demo.py": "def main():\n    exec("
        + repr(DEMO.format(succeeded=succeeded, code=code))
        + ")\n",
        f"{info}/METADATA": "Metadata-Version: 2.1\nName: aztask\nVersion: 1\n",
        f"{info}/WHEEL": "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
        f"{info}/entry_points.txt": "[console_scripts]\naztask = aztask_demo:main\n",
    }
    wheel = folder / "aztask-1-py3-none-any.whl"
    with ZipFile(wheel, "w") as archive:
        for name, text in files.items():
            archive.writestr(name, text)
        archive.writestr(f"{info}/RECORD", "".join(f"{name},,\n" for name in files))
    return wheel


def test_a_wheel_whose_demo_succeeds_is_ok(tmp_path: Path) -> None:
    row = release.try_archive(package(tmp_path), HERE)
    assert str(row) == f"ok         aztask-1-py3-none-any.whl on Python {HERE}: 3 tasks in 1 s"


@pytest.mark.parametrize(
    ("succeeded", "code", "says"), [(2, 0, "2 of 3 tasks succeeded"), (3, 7, "exit code 7")]
)
def test_a_demo_that_fails_is_a_failure(
    tmp_path: Path, succeeded: int, code: int, says: str
) -> None:
    row = release.try_archive(package(tmp_path, succeeded, code), HERE)
    assert row.state == "failed" and says in row.text


def test_a_wheel_that_cannot_be_installed_is_a_failure(tmp_path: Path) -> None:
    wheel = tmp_path / "aztask-1-py3-none-any.whl"
    wheel.write_bytes(b"no zip")
    assert release.try_archive(wheel, HERE).state == "failed"


def test_a_python_that_is_not_here_or_does_not_start_is_not_tried(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shim = tmp_path / "python3.99"
    shim.write_text("#!/bin/sh\necho not chosen >&2\nexit 127\n")
    shim.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    row = release.try_archive(tmp_path / "a.whl", "3.99")
    assert (row.state, row.text) == ("not tried", "there is no python3.99 here")


def test_a_python_that_is_not_here_is_one_of_debian(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(release, "interpreter", lambda version: None)
    monkeypatch.setattr("shutil.which", lambda name: None)
    monkeypatch.setattr(release, "DEBIAN", tmp_path / "debian")
    row = release.try_archive(tmp_path / "a.whl", "3.14")
    missing = "debootstrap is missing: apt-get install debootstrap"
    assert (row.state, row.text) == ("not tried", missing)
    command = release.place_for("3.14", tmp_path, tmp_path).command(["aztask"])
    assert "chroot" in command[-1] and str(ROOT) not in command[-1].partition("exec ")[2]


@pytest.mark.parametrize(("state", "code"), [("ok", 0), ("not tried", 0), ("failed", 1)])
def test_only_a_failure_ends_with_one(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    state: str,
    code: int,
) -> None:
    monkeypatch.setattr(release, "rows", lambda folder: [release.Row("one", state, "why")])
    assert release.main([str(tmp_path / "new")]) == code
    assert capsys.readouterr().out == f"{state:10} one: why\n"


def test_a_folder_with_files_is_refused(tmp_path: Path) -> None:
    (tmp_path / "old.whl").touch()
    assert release.main([str(tmp_path)]) == 2


# -- the workflow ----------------------------------------------------------------------------------


def test_the_workflow_fits_githubs_schema(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "check_jsonschema", "--builtin-schema"]
    command.append("vendor.github-workflows")
    for text, code in (
        (WORKFLOW.read_text(), 0),
        (WORKFLOW.read_text().replace("runs-on", "on"), 1),
    ):
        path = tmp_path / "workflow.yml"
        path.write_text(text)
        done = subprocess.run([*command, str(path)], capture_output=True, check=False)
        assert done.returncode == code, done.stdout


def test_without_a_folder_it_is_one_that_is_emptied_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "dist" / "release"
    folder.mkdir(parents=True)
    (folder / "old").touch()
    monkeypatch.setattr(release, "DEFAULT", folder)
    seen = []

    def rows(folder: Path) -> list[Any]:
        seen.append((folder, list(folder.iterdir())))
        return [release.Row("archives", "ok"), release.Row("3.14", release.NOT_TRIED)]

    monkeypatch.setattr(release, "rows", rows)
    assert release.main([]) == 0
    assert seen == [(folder, [])]


def test_a_folder_that_is_given_is_never_emptied(tmp_path: Path) -> None:
    (tmp_path / "mine").touch()
    assert release.main([str(tmp_path)]) == 2
    assert (tmp_path / "mine").exists()


def test_the_workflow_keeps_no_token_and_pins_what_it_uses() -> None:
    text = WORKFLOW.read_text()
    found = yaml.safe_load(text)
    assert "secrets." not in text
    assert found["permissions"] == {}
    assert found["jobs"]["publish"]["permissions"] == {"id-token": "write"}
    used = re.findall(r"uses: (\S+)", text)
    assert len(used) == 6
    assert all(re.fullmatch(r"[\w./-]+@[0-9a-f]{40}", each) for each in used)
    assert "Not run yet" in text


def test_the_workflow_tries_each_python_of_the_release() -> None:
    steps = yaml.safe_load(WORKFLOW.read_text())["jobs"]["build"]["steps"]
    (versions,) = [each["with"]["python-version"] for each in steps if "setup-python" in str(each)]
    assert tuple(versions.split()) == release.PYTHONS


def test_the_tag_is_compared_with_the_version() -> None:
    steps = yaml.safe_load(WORKFLOW.read_text())["jobs"]["build"]["steps"]
    (script,) = [each["run"] for each in steps if each.get("name") == "The tag is the version"]
    text = (ROOT / "aztask" / "version.py").read_text()
    (version,) = re.findall(r'(?m)^__version__ = "(.+)"$', text)
    for tag, code in ((f"v{version}", 0), (version, 1), ("v0", 1)):
        done = subprocess.run(
            ["bash", "-e", "-c", script],
            cwd=ROOT,
            env={"TAG": tag, "PATH": "/usr/bin:/bin"},
            check=False,
        )
        assert done.returncode == code, tag


def test_the_build_of_two_installations_of_one_wheel_is_one(tmp_path: Path) -> None:
    """`aztask --version --json` tells two wheels of one version apart."""
    script = "import sys, json; sys.path.insert(0, sys.argv[1])\n"
    script += "from importlib.metadata import Distribution, PathDistribution\n"
    script += "from pathlib import Path\nfrom aztask.support.versions import build_of\n"
    script += "print(build_of(PathDistribution(next(Path(sys.argv[1]).glob('*.dist-info')))))"
    found = []
    for number, body in enumerate(("one", "one", "two")):
        folder = tmp_path / str(number)
        (folder / "aztask-1.dist-info").mkdir(parents=True)
        record = f"aztask/a.py,sha256={body},3\naztask/__pycache__/a.pyc,,\n"
        record += f"bin/aztask,sha256={number},1\n"
        (folder / "aztask-1.dist-info" / "RECORD").write_text(record)
        (folder / "aztask-1.dist-info" / "METADATA").write_text("Name: aztask\nVersion: 1\n")
        done = subprocess.run(
            [sys.executable, "-c", script, str(folder)],
            cwd=ROOT,
            check=True,
            capture_output=True,
            text=True,
        )
        found.append(done.stdout.strip())
    assert found[0] == found[1] != found[2]
    assert json.dumps(found[0]).strip('"').isalnum()
