"""The wheel: the same bytes from two builds, and what its bill of materials says."""

from __future__ import annotations

import base64
import csv
import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
import tarfile
from configparser import ConfigParser
from pathlib import Path
from typing import Any
from zipfile import ZipFile

import pytest
from packaging.requirements import Requirement

ROOT = Path(__file__).parents[2]
SOURCES = ("aztask", "release", "aztask_kombu.py", "setup.cfg", "pyproject.toml", "README.md")
SOURCES += ("LICENSE", "MANIFEST.in", "CHANGELOG.md", "SECURITY.md")


def copied(folder: Path, *, umask: int) -> Path:
    """The sources as a fresh clone has them, with the times and modes of this moment."""
    before = os.umask(umask)
    try:
        folder.mkdir()
        for name in SOURCES:
            source = ROOT / name
            if source.is_dir():
                hidden = shutil.ignore_patterns("__pycache__")
                shutil.copytree(source, folder / name, ignore=hidden, copy_function=shutil.copyfile)
            else:
                shutil.copyfile(source, folder / name)
    finally:
        os.umask(before)
    return folder


def built(source: Path, target: Path, **environment: str) -> Path:
    done = subprocess.run(
        [sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", "-w", str(target), str(source)],
        check=True,
        env={**os.environ, **environment},
        stderr=subprocess.PIPE,
        text=True,
    )
    assert "BuildBackendWarning" not in done.stderr, "who installs from a clone would see it"
    (wheel,) = target.glob("*.whl")
    return wheel


@pytest.fixture(scope="module")
def wheels(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Built from two copies: another place, umask, language, zone and an earlier build's rests."""
    folder = tmp_path_factory.mktemp("wheels")
    first = copied(folder / "first", umask=0o022)
    second = copied(folder / "a second place", umask=0o077)
    left = second / "build" / "lib" / "aztask"
    left.mkdir(parents=True)
    (left / "of_an_earlier_build.py").touch()
    os.utime(second / "setup.cfg", (1e9, 1e9))
    return (
        built(first, folder / "1", TZ="UTC", PYTHONHASHSEED="1"),
        built(second, folder / "2", TZ="Asia/Tokyo", PYTHONHASHSEED="2", LC_ALL="C"),
    )


@pytest.fixture(scope="module")
def sbom(wheels: tuple[Path, Path]) -> dict[str, Any]:
    with ZipFile(wheels[0]) as archive:
        (name,) = (each for each in archive.namelist() if ".dist-info/sboms/" in each)
        found: dict[str, Any] = json.loads(archive.read(name))
    return found


def test_two_builds_give_the_same_bytes(wheels: tuple[Path, Path]) -> None:
    first, second = wheels
    assert first.name == second.name
    with ZipFile(first) as one, ZipFile(second) as other:
        assert one.namelist() == other.namelist()
    assert first.read_bytes() == second.read_bytes()


def links(readme: str) -> list[str]:
    found = re.findall(r"\]\(([^)\s]+)", readme) + re.findall(r"(?m)^\[[^\]\n]+\]: (\S+)", readme)
    return found + re.findall(r'(?:src|href)="([^"]+)"', readme)


def test_the_links_of_the_readme_work_on_a_package_index(
    wheels: tuple[Path, Path], tmp_path: Path
) -> None:
    with ZipFile(wheels[0]) as archive:
        (name,) = (each for each in archive.namelist() if each.endswith(".dist-info/METADATA"))
        texts = [archive.read(name).decode()]
    script = "import sys, backend; print(backend.build_sdist(sys.argv[1]))"
    done = subprocess.run(
        [sys.executable, "-c", script, str(tmp_path)],
        cwd=copied(tmp_path / "source", umask=0o022),
        env={**os.environ, "PYTHONPATH": "release"},
        check=True,
        capture_output=True,
        text=True,
    )
    with tarfile.open(tmp_path / done.stdout.split()[-1]) as archive:
        found = [archive.extractfile(each) for each in archive if each.name.endswith("PKG-INFO")]
        texts += [each.read().decode() for each in found if each is not None]
    assert len(texts) == 3  # one of the two of a source distribution is in its egg-info
    for text in texts:
        (source,) = re.findall(r"(?m)^Project-URL: Source, (\S+)$", text)
        targets = links(text.partition("\n\n")[2])
        assert [each for each in targets if not each.startswith(("https://", "#"))] == []
        assert f"{source}/blob/main/docs/quickstart.md" in targets


def test_a_link_of_each_form_is_made_absolute() -> None:
    sys.path.insert(0, str(ROOT / "release"))
    try:
        import backend  # noqa: PLC0415  # a hook of the build, in no package
    finally:
        sys.path.pop(0)
    readme = "[a](docs/a.md) [b](https://b.example/) [e](#e)\n[`c`]: c.md\n[d]: https://d.example\n"
    head = "Name: x\nProject-URL: Source, https://s.example/x\n\n"
    expected = "[a](https://s.example/x/blob/main/docs/a.md) [b](https://b.example/) [e](#e)\n"
    expected += "[`c`]: https://s.example/x/blob/main/c.md\n[d]: https://d.example\n"
    assert backend.with_absolute_links((head + readme).encode()) == (head + expected).encode()
    with pytest.raises(ValueError, match="no Source"):
        backend.with_absolute_links(b"Name: x\n\n[a](b)\n")


def test_every_file_of_the_package_is_in_the_wheel(wheels: tuple[Path, Path]) -> None:
    there = {
        path.relative_to(ROOT).as_posix()
        for path in (ROOT / "aztask").rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }
    with ZipFile(wheels[0]) as wheel:
        assert there - set(wheel.namelist()) == set(), "add it to package_data in setup.cfg"


def test_the_record_is_of_what_is_in_the_wheel(wheels: tuple[Path, Path]) -> None:
    with ZipFile(wheels[0]) as archive:
        names = archive.namelist()
        (record,) = (name for name in names if name.endswith(".dist-info/RECORD"))
        rows = list(csv.reader(archive.read(record).decode().splitlines()))
        assert sorted(row[0] for row in rows) == sorted(names)
        for name, digest, size in rows:
            if name == record:
                continue
            data = archive.read(name)
            found = base64.urlsafe_b64encode(hashlib.sha256(data).digest()).rstrip(b"=").decode()
            assert (digest, int(size)) == (f"sha256={found}", len(data)), name
    assert "aztask/py.typed" in names
    assert "aztask/dashboard/static/htmx.min.js" in names
    assert not any("earlier_build" in name or "tests/" in name for name in names)


def test_the_wheel_installs_and_runs(wheels: tuple[Path, Path], tmp_path: Path) -> None:
    words = ["install", "-q", "--no-deps", "--target", str(tmp_path), str(wheels[0])]
    subprocess.run([sys.executable, "-m", "pip", *words], check=True)
    done = subprocess.run(
        [sys.executable, "-m", "aztask", "--version"],
        env={**os.environ, "PYTHONPATH": str(tmp_path)},
        cwd=tmp_path,
        check=True,
        capture_output=True,
        text=True,
    )
    assert done.stdout.startswith("aztask")


def test_the_bill_lists_every_requirement(sbom: dict[str, Any]) -> None:
    settings = ConfigParser()
    settings.read(ROOT / "setup.cfg")
    lines = settings["options"]["install_requires"].split("\n")
    always = {Requirement(line).name for line in lines if line}
    extras = {
        Requirement(line).name
        for text in settings["options.extras_require"].values()
        for line in text.split("\n")
        if line
    }
    found = {each["name"]: each for each in sbom["components"] if "pypi" in each["purl"]}
    assert found.keys() == always | extras
    required = {name for name, each in found.items() if each["scope"] == "required"}
    assert required == always
    (kombu,) = found["kombu"]["properties"]
    assert kombu["name"] == "aztask:requires"
    assert Requirement(kombu["value"]).specifier


def test_the_bill_lists_what_others_wrote(sbom: dict[str, Any], wheels: tuple[Path, Path]) -> None:
    found = [each for each in sbom["components"] if "npm" in each["purl"]]
    licences = [(each["name"], each["licenses"][0]["license"]["id"]) for each in found]
    assert sorted(licences) == [("htmx.org", "0BSD"), ("uplot", "MIT"), ("uplot", "MIT")]
    for each in found:
        (place,) = (one["location"] for one in each["evidence"]["occurrences"])
        with ZipFile(wheels[0]) as archive:
            digest = hashlib.sha256(archive.read(place)).hexdigest()
        assert each["hashes"] == [{"alg": "SHA-256", "content": digest}]


def test_the_bill_keeps_to_the_schema_of_cyclonedx(sbom: dict[str, Any]) -> None:
    validation = pytest.importorskip("cyclonedx.validation.json")
    schema = pytest.importorskip("cyclonedx.schema")
    validator = validation.JsonStrictValidator(schema.SchemaVersion.V1_6)
    assert validator.validate_str(json.dumps(sbom)) is None


def test_the_bill_names_the_time_only_if_the_build_says_it(
    sbom: dict[str, Any], tmp_path: Path
) -> None:
    assert "timestamp" not in sbom["metadata"]
    source = copied(tmp_path / "source", umask=0o022)
    wheel = built(source, tmp_path / "wheel", SOURCE_DATE_EPOCH="1767225600")
    with ZipFile(wheel) as archive:
        assert {entry.date_time for entry in archive.infolist()} == {(2026, 1, 1, 0, 0, 0)}
        (name,) = (each for each in archive.namelist() if ".dist-info/sboms/" in each)
        about = json.loads(archive.read(name))["metadata"]
    assert about["timestamp"] == "2026-01-01T00:00:00Z"
