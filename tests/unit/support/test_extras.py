"""The commands that install extras: each extra exists, and every shell takes the quotes."""

import configparser
import re
import shlex
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
    ],
)
def test_the_command_installs_what_was_missing(extra, packages):
    assert packages <= extras()[extra]
    program, action, asked = shlex.split(install_command(extra))
    requirement = Requirement(asked)
    assert (program, action) == ("pip", "install")
    assert (requirement.name, requirement.extras) == ("aztask", {extra})
