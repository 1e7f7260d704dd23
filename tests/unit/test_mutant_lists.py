"""What the mutation run keeps in lists names modules and tests that exist."""

import json
import re
from collections import Counter

from tests.mutants.modules import MODULES, ROOT

HERE = ROOT / "tests" / "mutants"


def source(name):
    return ROOT / (name.replace(".", "/") + ".py")


def test_the_core_modules_exist_and_are_listed_once():
    assert {name: n for name, n in Counter(MODULES).items() if n > 1} == {}
    assert [name for name in MODULES if not source(name).is_file()] == []


def test_every_core_module_is_measured_and_its_tests_exist():
    """Of one that is not, a small draw would try tests that do not reach it."""
    near = json.loads((HERE / "near.json").read_text())
    assert set(near) == set(MODULES), "python -m tests.mutants --map, some minutes"
    reached_by_none = [name for name, each in near.items() if not each["tests"]]
    assert reached_by_none == ["aztask.message.envelope"], "it has fields only"
    tests = {test for each in near.values() for test in each["tests"]}
    assert [test for test in sorted(tests) if not (ROOT / test).is_file()] == []


def test_the_marks_are_of_core_modules():
    text = (HERE / "equivalent.txt").read_text()
    marked = {line.partition(" ")[0] for line in text.splitlines() if re.match("[a-z]", line)}
    short = {".".join(name.split(".")[1:][-2:]) for name in MODULES}
    assert len(marked) > 20
    assert sorted(marked - short) == []
