"""The versions of Python that aztask says it supports are those that are tried."""

import configparser
import re
from pathlib import Path

from aztask.version import __version__
from tests.pythons.checks import PYTHONS

ROOT = Path(__file__).parents[2]
EVERY_RUN = "3.11"


def page_versions():
    """{version: how} of the page's rows that say yes."""
    page = (ROOT / "docs" / "reference" / "versions.md").read_text(encoding="utf-8")
    return dict(re.findall(r"(?m)^\| (3\.\d+) \| yes \| (.+) \|$", page))


def test_the_systems_of_the_classifiers_are_those_of_the_page():
    settings = configparser.ConfigParser(interpolation=None)
    settings.read(ROOT / "setup.cfg")
    named = re.findall(
        r"Operating System :: (?:\w+ :: )?(\w+)$", settings["metadata"]["classifiers"], re.M
    )
    page = (ROOT / "docs" / "platforms.md").read_text(encoding="utf-8")
    (head,) = re.findall(r"^\| \| (.+) \|$", page.partition("## What was tried")[0], re.M)
    assert [each.casefold() for each in named] == head.casefold().split(" | ")
    assert "**We have not tried a real macOS or Windows machine.**" in page


def test_each_version_that_is_tested_has_a_classifier():
    settings = configparser.ConfigParser(interpolation=None)
    settings.read(ROOT / "setup.cfg")
    named = re.findall(r"Python :: (3\.\d+)$", settings["metadata"]["classifiers"], re.MULTILINE)
    assert named == list(page_versions())
    assert settings["options"]["python_requires"] == f">={EVERY_RUN}"


def test_each_version_that_is_tested_is_tried():
    assert list(page_versions()) == [EVERY_RUN, *(python.version for python in PYTHONS)]
    for python in PYTHONS:
        assert python.suite in page_versions()[python.version]


def test_the_version_gets_security_fixes():
    policy = (ROOT / "SECURITY.md").read_text(encoding="utf-8")
    supported = re.findall(r"(?m)^\| ([\d.x]+) \| yes \|$", policy)
    assert supported == [f"{__version__.rpartition('.')[0]}.x"]
