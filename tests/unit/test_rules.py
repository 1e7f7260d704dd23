"""docs/rules.md tells the truth: its rows are complete, its modules and its tests exist."""

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
ROW = re.compile(r"^\| (\d+) \| (.+?) \| (.+?) \| (.+?) \|$", re.MULTILINE)
LATER = {
    "storage queue: later",
    "service bus: later",
    "data pipeline: later",
}


def rows(text):
    """(number, rule, modules, tests, what is later) of each row."""
    for number, rule, modules, proofs in ROW.findall(text):
        later = re.sub(r"`[^`]*`|[,;] ", "\n", proofs)
        yield (
            int(number),
            rule,
            re.findall(r"`([^`]+)`", modules),
            re.findall(r"`([^`]+)`", proofs),
            {line.strip() for line in later.split("\n") if line.strip(" ;,")},
        )


def names_in(path):
    tree = ast.parse(path.read_text(encoding="utf-8"))
    return {node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)}


def problems(text, root):
    """What is wrong with the page, as lines."""
    found = []
    for number, rule, modules, proofs, later in rows(text):
        if len(rule) < 20:
            found.append(f"{number}: says nothing")
        found += [
            f"{number}: there is no module {module}"
            for module in modules
            if not (root / "aztask" / module).is_file()
        ]
        for proof in proofs:
            path, _, name = proof.partition("::")
            if not (root / "tests" / path).is_file():
                found.append(f"{number}: there is no file tests/{path}")
            elif not name.startswith("test_") or name not in names_in(root / "tests" / path):
                found.append(f"{number}: there is no test {proof}")
        found += [f"{number}: {word!r} is no reason" for word in sorted(later - LATER)]
        if not modules:
            found.append(f"{number}: no module holds it")
        if not proofs and not later:
            found.append(f"{number}: nothing proves it")
    return found


@pytest.fixture
def page():
    return (ROOT / "docs" / "rules.md").read_text(encoding="utf-8")


def test_every_rule_is_there_once_and_in_order(page):
    assert [number for number, *_ in rows(page)] == list(range(1, 33))


def test_every_module_and_every_test_that_is_named_exists(page):
    assert "\n".join(problems(page, ROOT)) == ""


@pytest.mark.parametrize(
    ("row", "words"),
    [
        ("| 1 | short | `errors.py` | `unit/test_rules.py::test_x` |", "says nothing"),
        ("| 1 | a rule that is long enough | `x.py` | storage queue: later |", "no module x.py"),
        ("| 1 | a rule that is long enough | none | storage queue: later |", "no module holds"),
        ("| 1 | a rule that is long enough | `errors.py` | `unit/x.py::test_x` |", "no file"),
        ("| 1 | a rule that is long enough | `errors.py` | `unit/test_rules.py` |", "no test"),
        (
            "| 1 | a rule that is long enough | `errors.py` | `unit/test_rules.py::test_x` |",
            "no test unit/test_rules.py::test_x",
        ),
        ("| 1 | a rule that is long enough | `errors.py` | somehow |", "'somehow' is no reason"),
        ("| 1 | a rule that is long enough | `errors.py` | ; |", "nothing proves it"),
    ],
)
def test_the_check_can_fail(row, words):
    assert any(words in problem for problem in problems(row, ROOT))
