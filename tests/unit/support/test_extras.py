"""The commands that install extras: each extra exists, and every shell takes the quotes."""

import configparser
import json
import re
import shlex
import subprocess
import sys
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from aztask.support.late import install_command

ROOT = Path(__file__).parents[3]
IN_CODE = re.compile(r"install_command\(['\"](\w+)['\"]\)")
IN_TEXT = re.compile(r"""pip install (['"]?)aztask\[([\w,]+)\]['"]?""")


def extras():
    """The packages of each extra."""
    read = configparser.ConfigParser()
    read.read(ROOT / "setup.cfg")
    section = read["options.extras_require"]
    return {
        name: {Requirement(line).name for line in text.split("\n") if line}
        for name, text in section.items()
    }


def texts():
    paths = [*ROOT.glob("aztask/**/*.py"), *ROOT.glob("docs/**/*.md"), ROOT / "README.md"]
    return {path.relative_to(ROOT).as_posix(): path.read_text(encoding="utf-8") for path in paths}


def test_every_extra_that_is_named_exists():
    found = [(path, name) for path, text in texts().items() for name in IN_CODE.findall(text)]
    assert len(found) >= 8
    assert [(path, name) for path, name in found if name not in extras()] == []


def test_commands_in_texts_have_double_quotes_and_extras_that_exist():
    found = [(path, *each) for path, text in texts().items() for each in IN_TEXT.findall(text)]
    wrong = [
        (path, names)
        for path, quote, names in found
        if quote != '"' or not set(names.split(",")) <= extras().keys()
        if path != "aztask/support/late.py"
    ]
    assert wrong == []


@pytest.mark.parametrize(
    ("extra", "packages"),
    [
        ("identity", {"azure-identity"}),
        ("blob", {"azure-storage-blob"}),
        ("tables", {"azure-data-tables", "azure-storage-blob"}),
        ("websockets", {"websocket-client"}),
        ("reload", {"watchfiles"}),
        ("spark", {"pyspark", "pyarrow", "pandas", "jinja2"}),
        ("delta", {"deltalake"}),
        ("spark-connect", {"pyspark-client", "pyarrow", "pandas", "jinja2"}),
    ],
)
def test_the_command_installs_what_was_missing(extra, packages):
    assert packages <= extras()[extra]
    program, action, asked = shlex.split(install_command(extra))
    requirement = Requirement(asked)
    assert (program, action) == ("pip", "install")
    assert (requirement.name, requirement.extras) == ("aztask", {extra})


ALWAYS = ("test", "tls", "crypto")  # azure-storage-queue brings cryptography, too
OF_AN_EXTRA = (
    "aztask.agents.",
    "aztask.azure.container",
    "aztask.azure.trials",
    "aztask.celery.backend",
    "aztask.celery.migration.",
    "aztask.dashboard.",
    "aztask.django",
    "aztask.leaseadvice.blob",
    "aztask.operate.celerybeat",
    "aztask.operate.top.screen",
    "aztask.spark.",
    "aztask.stores.events.blobs",
    "aztask.stores.payloads.blob",
    "aztask.stores.records.tables.",
    "aztask.stores.tables.",
    "aztask.telemetry.otel",
    "aztask.telemetry.prometheus.",
)
"""The modules that need an extra; what imports one of them does so when it is used."""

WALK = """
import importlib, json, pkgutil, sys

missing = set(json.loads(sys.argv[1]))

class Refuse:
    def find_spec(self, name, path=None, target=None):
        if name in missing:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

sys.meta_path.insert(0, Refuse())
import aztask

failed = {}
for module in pkgutil.walk_packages(aztask.__path__, "aztask."):
    try:
        importlib.import_module(module.name)
    except ImportError as error:
        failed[module.name] = error.name
print(json.dumps(failed))
"""


def packages_of(name):
    """The importable packages that a distribution brings, without the namespaces it shares."""
    files = [path.parts for path in distribution(name).files or () if path.suffix == ".py"]
    shared = {("azure",), ("azure", "storage"), ("azure", "data"), ("opentelemetry",)}
    found = {parts[:-1] for parts in files if parts[-1] == "__init__.py"} - shared
    return {
        ".".join(one) for one in found if all(one[:size] not in found for size in range(len(one)))
    }


def test_what_needs_an_extra_is_imported_late():
    """As after ``pip install aztask``: the app, the worker and each command import without it."""
    missing = packages_of("celery")
    for name in set().union(*(each for extra, each in extras().items() if extra not in ALWAYS)):
        try:
            missing |= packages_of(name)
        except PackageNotFoundError:
            continue  # then it cannot be imported by mistake
    assert {"azure.storage.blob", "azure.data.tables", "azure.identity", "django"} <= missing
    run = subprocess.run(
        [sys.executable, "-c", WALK, json.dumps(sorted(missing))],
        capture_output=True,
        text=True,
        check=True,
    )
    failed = json.loads(run.stdout)
    assert "aztask.azure.container" in failed
    assert {name: of for name, of in failed.items() if not name.startswith(OF_AN_EXTRA)} == {}
