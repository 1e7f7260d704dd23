"""What aztask requires of others: bounds that are needed, bounds that are tried, and licences."""

from __future__ import annotations

import re
from configparser import ConfigParser, RawConfigParser
from importlib.metadata import Distribution, PackageNotFoundError, distribution
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

ROOT = Path(__file__).parents[2]

PRIVATE = {
    "azure-servicebus": r"from azure\.servicebus\._",
    "kombu": r"(?:kombu|Transport|Channel|virtual)\b",  # a transport is a subclass of Kombu's own
    "msal": r"response_mode",  # it warns of answers as a query, which it may remove
    "pandas": r"createDataFrame",  # PySpark's client of Spark Connect warns of pandas 3
    "mcp": r"from mcp\.server\.lowlevel",  # release 2 renamed its classes
}
"""Packages of which something is used that their makers may change, and how that shows."""

NOT_TRIED = {
    "azure-functions": "of an example, whose test uses the newest",
    "certifi": "any version is good",
    "deltalake": "of Spark",
    "django": "`tox -e pythons` tries two versions",
    "django-tasks": "`tox -e pythons`",
    "hypothesis": "a tool for tests",
    "pytest": "a tool for tests",
    "jinja2": "of the dashboard and the reports, whose tests need newer tools",
    "libcst": "of `aztask migrate`, whose tests need the newest Celery",
    "mcp": "of `aztask mcp`, whose tests need newer tools",
    "msal": "of the dashboard",
    "pandas": "of Spark",
    "pyarrow": "of Spark",
    "pyjwt": "of the dashboard",
    "pyspark-client": "`tox -e spark-long`",
    "pyspark": "the oldest that is allowed is the one that all tests use",
    "python-multipart": "of the dashboard",
    "starlette": "of the dashboard",
    "textual": "of `aztask top`",
    "uvicorn": "of the dashboard",
    "watchfiles": "of `--reload`",
}


def settings(name: str) -> ConfigParser:
    found = ConfigParser(interpolation=None)
    found.read(ROOT / name)
    return found


def required() -> list[Requirement]:
    setup = settings("setup.cfg")
    texts = [setup["options"]["install_requires"], *setup["options.extras_require"].values()]
    return [Requirement(line) for text in texts for line in text.split("\n") if line]


def test_an_upper_bound_is_only_for_what_is_used_in_ways_that_are_not_promised() -> None:
    bounded = {each.name for each in required() if "<" in str(each.specifier)}
    assert bounded == PRIVATE.keys()
    code = "\n".join(path.read_text(encoding="utf-8") for path in ROOT.glob("aztask/**/*.py"))
    for pattern in PRIVATE.values():
        assert re.search(pattern, code)


def test_each_lower_bound_is_tried() -> None:
    """`tox -e oldest` installs exactly these versions."""
    pinned = [Requirement(line) for line in settings("tox.ini")["testenv:oldest"]["deps"].split()]
    tried = {each.name: str(each.specifier).removeprefix("==") for each in pinned}
    for each in required():
        if each.name in NOT_TRIED:
            continue
        (least,) = (part.version for part in each.specifier if part.operator == ">=")
        assert Version(tried[each.name]) == Version(least), each.name
    assert NOT_TRIED.keys() <= {each.name for each in required()}


# -- what .ci/run installs ---------------------------------------------------------------------

LOCKED = re.compile(
    r"(?m)^([\w.-]+)==([^ ;\\]+)(?: ; [^\\\n]+)?((?: \\\n    --hash=sha256:[0-9a-f]{64})*)$"
)


def locked(name: str) -> dict[str, set[str]]:
    """{package: its versions} of a file of hashes; each line of it has been understood."""
    text = (ROOT / ".ci" / name).read_text(encoding="utf-8")
    found: dict[str, set[str]] = {}
    for package, version, hashes in LOCKED.findall(text):
        assert "--hash=sha256:" in hashes, package
        found.setdefault(canonicalize_name(package), set()).add(version)
    rest = [line for line in LOCKED.sub("", text).splitlines() if line and line[0] != "#"]
    assert rest == []
    return found


@pytest.mark.skipif(not (ROOT / ".ci").exists(), reason="no part of a source distribution")
def test_what_the_check_installs_has_hashes_and_fits_what_is_asked_for() -> None:
    """`.ci/lock` writes both files."""
    known = locked("requirements.txt")
    shared = settings("tox.ini")["testenv"]
    wanted = [Requirement(line) for line in shared["deps"].split("\n") if line]
    setup = settings("setup.cfg")
    texts = [setup["options"]["install_requires"]]
    texts += [setup["options.extras_require"][extra] for extra in shared["extras"].split()]
    wanted += [Requirement(line) for text in texts for line in text.split("\n") if line]
    assert len(wanted) > 50
    for each in wanted:
        versions = known[canonicalize_name(each.name)]
        assert all(each.specifier.contains(version) for version in versions), each
    assert "tox" in locked("tox.txt")


@pytest.mark.skipif(not (ROOT / ".ci").exists(), reason="no part of a source distribution")
def test_the_check_installs_by_hash() -> None:
    script = (ROOT / ".ci" / "run").read_text(encoding="utf-8")
    assert "--require-hashes -r .ci/tox.txt" in script
    assert 'locked="testenv.deps=-r .ci/requirements.txt"' in script
    assert script.count('tox" run -x "$locked"') == script.count('tox" run') > 0


# -- licences --------------------------------------------------------------------------------

FREE = {
    "0BSD",
    "Apache-2.0",
    "BSD-2-Clause",
    "BSD-3-Clause",
    "ISC",
    "MIT",
    "MIT-0",
    "MPL-2.0",  # a change of its files is published; ours are not changed by that
    "PSF-2.0",
    "Unlicense",
    "Zlib",
    "CC0-1.0",
    "CNRI-Python",
    "LLVM-exception",
    "BSL-1.0",
}
SPELLINGS = {
    "3-Clause BSD License": "BSD-3-Clause",
    "Apache 2": "Apache-2.0",
    "Apache 2.0": "Apache-2.0",
    "Apache License 2.0": "Apache-2.0",
    "Apache License, Version 2.0": "Apache-2.0",
    "Apache Software License": "Apache-2.0",
    "Apache Software License 2.0": "Apache-2.0",
    "http://www.apache.org/licenses/LICENSE-2.0": "Apache-2.0",
    "BSD": "BSD-3-Clause",
    "BSD License": "BSD-3-Clause",
    "MIT License": "MIT",
    "MIT license": "MIT",
    "Mozilla Public License 2.0 (MPL 2.0)": "MPL-2.0",
    "Python Software Foundation License": "PSF-2.0",
    "The Unlicense (Unlicense)": "Unlicense",
    "ISC License (ISCL)": "ISC",
}


def licences(found: Distribution) -> set[str]:
    """The SPDX names that the metadata of a package gives, in one form or another."""
    about = found.metadata
    if expression := about.get("License-Expression"):
        return set(re.findall(r"[\w.-]+", expression)) - {"AND", "OR", "WITH"}
    named = [
        line.rpartition(" :: ")[2]
        for line in about.get_all("Classifier") or []
        if line.startswith("License :: ") and not line.endswith("OSI Approved")
    ]
    text = (about.get("License") or "").strip()
    if not named and text:
        named = [text.splitlines()[0]]
    return {SPELLINGS.get(name, name) for name in named}


def closure() -> dict[str, Distribution]:
    """Every package that an installation with all extras brings, as far as it is installed here."""
    found: dict[str, Distribution] = {}
    waiting = [each for each in required() if each.name not in ("pytest", "hypothesis")]
    while waiting:
        wanted = waiting.pop()
        name = canonicalize_name(wanted.name)
        try:
            package = distribution(name)
        except PackageNotFoundError:
            continue
        extras = sorted(wanted.extras) or [""]
        if name not in found:
            found[name] = package
            for line in package.requires or ():
                inner = Requirement(line)
                if inner.marker is None or any(
                    inner.marker.evaluate({"extra": extra}) for extra in extras
                ):
                    waiting.append(inner)
    return found


def test_every_package_that_is_installed_has_a_licence_that_allows_it() -> None:
    found = closure()
    assert len(found) > 30, "the extras are installed"
    given = {name: licences(package) for name, package in sorted(found.items())}
    wrong = {name: each for name, each in given.items() if not each or not each <= FREE}
    assert wrong == {}


def test_an_environment_whose_tests_call_pip_has_it() -> None:
    """An environment that uv makes has none."""
    tox = RawConfigParser()
    tox.read(ROOT / "tox.ini")
    calling: dict[str, bool] = {}
    for name in tox.sections():
        if not name.startswith("testenv:") or not tox.has_option(name, "deps"):
            continue  # the others have pip from the section that all share
        found = re.findall(r"\btests[./][\w./]+", tox.get(name, "commands"))
        places = [ROOT / each.replace(".", "/") for each in found if not each.endswith(".py")]
        places += [ROOT / each for each in found if each.endswith(".py")]
        files = [file for each in places for file in (each, *each.rglob("*.py")) if file.is_file()]
        if any('"-m", "pip"' in file.read_text() for file in files):
            calling[name] = "pip" in tox.get(name, "deps").split()
    assert len(calling) >= 3 and all(calling.values()), calling
