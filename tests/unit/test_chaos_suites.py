"""Every seeded chaos suite has a second owner on the same result store.

A chaos test is one that draws from a seed which process dies. It is found in the source: what it
uses, of its module and by way of other functions, fixtures and classes there, names both a
``Random`` and something with "kill" in its name. Then it must use `neighbour_of`, too.
"""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

SUITES = Path(__file__).parents[1] / "integration"

REASONS = {
    "test_queues_are_moved_under_load": "in the contract: rows of layouts have their owner",
    "test_workers_that_are_stopped_under_load_lose_nothing": "workers are stopped, none is killed",
    "test_each_occurrence_is_sent_once_while_beats_of_two_versions_die": "no worker: beats alone",
    "test_nothing_that_was_accepted_vanishes_on_its_way": "the emulator alone: no worker, no store",
}
"""Tests that draw and kill, and need no second owner, with the reason."""


def names_in(node: ast.AST) -> set[str]:
    """Every name that a piece of code uses, with its arguments: pytest's fixtures."""
    found = set()
    for each in ast.walk(node):
        if isinstance(each, ast.Name):
            found.add(each.id)
        elif isinstance(each, ast.Attribute):
            found.add(each.attr)
        elif isinstance(each, ast.arg):
            found.add(each.arg)
    return found


def used_by_tests(source: str) -> dict[str, set[str]]:
    """{test: every name that it uses, by way of the module's own functions and classes, too}."""
    own = {
        node.name: names_in(node)
        for node in ast.parse(source).body
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef)
    }
    found = {}
    for test in own:
        if not test.startswith("test_"):
            continue
        seen, waiting = set(), {test}
        while waiting:
            name = waiting.pop()
            seen.add(name)
            waiting |= own.get(name, set()) - seen
        found[test] = seen
    return found


def is_chaos(used: set[str]) -> bool:
    return "Random" in used and any("kill" in name.lower() for name in used)


def chaos_tests() -> dict[str, set[str]]:
    found = {}
    for path in sorted(SUITES.glob("test_*.py")):
        tests = used_by_tests(path.read_text(encoding="utf-8"))
        found.update({test: used for test, used in tests.items() if is_chaos(used)})
    return found


def test_every_chaos_test_has_a_second_owner() -> None:
    found = chaos_tests()
    assert len(found) >= 10
    without = {test for test, used in found.items() if "neighbour_of" not in used}
    assert sorted(without - REASONS.keys()) == []
    assert REASONS.keys() <= without, "a reason for a test that needs none"


@pytest.mark.parametrize(
    ("body", "chaos"),
    [
        ("dice = random.Random(3)\n    worker.kill()", True),
        ("helper(site)", True),
        ("dice = random.Random(3)", False),
        ("worker.kill()", False),
    ],
)
def test_what_is_a_chaos_test(body: str, chaos: bool) -> None:
    source = (
        f"def test_it(site):\n    {body}\n"
        "def helper(site):\n    Inner(site)\n"
        "class Inner:\n    def go(self):\n        Random(3)\n        kill_some(self)\n"
    )
    assert is_chaos(used_by_tests(source)["test_it"]) == chaos
