"""Every file and test that the guides name exists, and the packages they list are all."""

import ast
import configparser
import re
import shlex
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
# Names of files beside code, in links, and in commands. Rules name modules under aztask/ and tests
# under tests/, as the page says itself.
NAME = re.compile(r"[\w.-]*\w/[\w./-]*|\b[\w-]+\.(?:py|md|cfg|ini|toml|svg)\b")
UNDER = {
    "docs/architecture.md": ("", "docs"),
    "docs/rules.md": ("", "docs", "aztask", "tests"),
    "CONTRIBUTING.md": ("",),
    "docs/security.md": ("", "docs"),
}
PROOF = re.compile(r"\[`(test_\w+)`\]\(\.\./(tests/[\w/]+\.py)\)")
"""A link to a test function, as docs/security.md writes it."""
SOURCE = re.compile(r"`([^`\n]+)`|\]\(([^)\s]+)\)|\{doc\}`(?:[^`<]*<)?([\w/-]+)>?`")


def named(text):
    """The names of files and folders in inline code, links and commands."""
    commands = re.findall(r"(?ms)^```sh\n(.*?)^```", text)
    prose = re.sub(r"(?ms)^```.*?^```", "", text)
    found = set()
    for code, link, page in SOURCE.findall(prose):
        if page:
            found.add(f"{page.lstrip('/')}.md")
        else:
            found |= set(NAME.findall((code or link).partition("::")[0]))
    for command in commands:
        found |= set(NAME.findall(command))
    return {name for name in found if not name.startswith((".venv", "http"))}


def missing(text, roots):
    return sorted(
        name for name in named(text) if not any((ROOT / under / name).exists() for under in roots)
    )


@pytest.mark.parametrize("guide", UNDER)
def test_every_file_that_a_guide_names_exists(guide):
    text = (ROOT / guide).read_text(encoding="utf-8")
    assert len(named(text)) > 20
    assert missing(text, UNDER[guide]) == []


@pytest.mark.parametrize(
    "text",
    [
        "see `aztask/nowhere.py`",
        "see [it](docs/nowhere.md)",
        "see {doc}`nowhere`",
        "see {doc}`the page <how-to/nowhere>`",
        "see `tests/nowhere/`",
        "see `nowhere.cfg`",
        "run `python docs/nowhere.py`",
        "```sh\npython -m pytest tests/nowhere.py\n```",
    ],
)
def test_a_file_that_does_not_exist_is_found(text):
    assert len(missing(text, ("", "docs"))) == 1


def proofs(text):
    """(function, file) of every test that is named as a proof."""
    return PROOF.findall(text)


def roles(text):
    """The cells of the table of roles in docs/security.md, without the first column."""
    table = text.partition("| who | reads |")[2].partition("\n\n")[0]
    rows = [line.strip("|").split(" | ") for line in table.splitlines()[2:]]
    return [cell for row in rows for cell in row[1:]]


def test_each_cell_of_the_table_of_roles_names_a_test():
    cells = roles((ROOT / "docs/security.md").read_text(encoding="utf-8"))
    assert len(cells) == 8 * 5
    assert [cell for cell in cells if not proofs(cell)] == []


def test_each_line_of_the_tables_names_a_test():
    """The page says so: what attackers can do and cannot, and where arguments are."""
    text = (ROOT / "docs/security.md").read_text(encoding="utf-8")
    tables = re.findall(r"(?m)^\|.*proved by \|\n\|[-|]+\|\n((?:\|.*\n)+)", text)
    lines = [line for table in tables for line in table.splitlines()]
    assert len(lines) > 80
    assert [line for line in lines if not proofs(line)] == []


def missing_proofs(text):
    found = []
    for name, file in proofs(text):
        path = ROOT / file
        tree = ast.parse(path.read_text(encoding="utf-8")) if path.is_file() else ast.Module([], [])
        if not any(getattr(node, "name", None) == name for node in ast.walk(tree)):
            found.append(f"{file}::{name}")
    return found


def claims(text):
    """The rows of the page's tables, without heads."""
    rows = [line for line in text.splitlines() if line.startswith("| ")]
    return [row for row in rows if not row.endswith(("| proved by |", "| repeats | runs |"))]


def test_every_claim_about_security_names_tests_that_exist():
    text = (ROOT / "docs" / "security.md").read_text(encoding="utf-8")
    assert len(claims(text)) > 30
    assert [row for row in claims(text) if not proofs(row)] == []
    assert text.count("](../tests/") == len(proofs(text)), "each link is read"
    assert missing_proofs(text) == []


@pytest.mark.parametrize(
    ("name", "file", "problems"),
    [
        ("test_every_claim_about_security_names_tests_that_exist", "test_named_files", 0),
        ("test_nothing", "test_named_files", 1),
        ("test_nothing", "test_nowhere", 1),
    ],
)
def test_a_test_that_does_not_exist_is_found(name, file, problems):
    text = f"| x | [`{name}`](../tests/unit/{file}.py) |"
    assert len(proofs(text)) == 1
    assert len(missing_proofs(text)) == problems


def packages():
    return {path.parent.name for path in (ROOT / "aztask").glob("*/__init__.py")}


def listed(text):
    return re.findall(r"(?m)^\| `aztask/(\w+)/` \| \w.{10,} \|$", text)


def test_the_packages_of_the_architecture_are_those_that_exist():
    text = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
    assert sorted(listed(text)) == sorted(packages())


def test_a_package_that_is_missing_would_be_noticed():
    assert listed("| `aztask/worker/` | the commands, one file each |\n") == ["worker"]
    assert listed("| `aztask/worker/` | |\n") == []


def test_every_environment_of_tox_is_explained():
    settings = configparser.ConfigParser(interpolation=None)
    settings.read(ROOT / "tox.ini")
    names = {name.partition(":")[2] for name in settings.sections() if name.startswith("testenv:")}
    text = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    first, _, others = text.partition("The others take long")
    explained = re.findall(r"(?m)^\| `([\w-]+)` \| ", text.partition("## The tox environments")[2])
    assert names == set(explained[: len(names)])
    for name in settings["tox"]["env_list"].split():
        assert f"| `{name}` |" in first and f"| `{name}` |" not in others


def test_the_packages_to_install_are_those_of_tox():
    settings = configparser.ConfigParser(interpolation=None)
    settings.read(ROOT / "tox.ini")
    wanted = {re.split("[<>=]", line)[0] for line in settings["testenv"]["deps"].split()}
    text = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    (line,) = re.findall(r"(?m)^pip install (celery .*)$", text)
    assert set(shlex.split(line)) == wanted
