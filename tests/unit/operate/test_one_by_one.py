"""What asks a store once for each of many: found by code, and each place has its bound.

A loop that asks for one run after the other costs a request for each on Azure Tables. So lists read
in bulk (`ResultStore.lines`, `get_many`, `Graphs.roots`), and what is left in a loop says here why.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[3] / "aztask"
ROOMS = ("operate", "dashboard", "agents")
STORES = frozenset({"store", "_store", "results", "_results", "graphs"})
ONE = frozenset({"get", "history", "root", "forget", "cancel"})
"""The questions about one run or workflow."""

LOOPS = frozenset(
    {ast.For, ast.While, ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp, ast.AsyncFor}
)
IN_LOOPS = {
    "operate.deadletters.view.plan": "a replay: one request for each message that it sends",
}
"""{function: why it asks in a loop}."""
RECENT = {
    "operate.doctor": "the rows in quarantine that the check names",
    "operate.owners": "1,000 runs, once for a command that moves rows",
    "operate.search": "the quarantine, at most 200 rows",
    "operate.tasks": "as many as the caller of `aztask result` asks for",
}
"""{module: how many rows it reads}: `ResultStore.recent` reads the row of each run in its list."""


def asked_one_by_one(tree: ast.AST) -> set[str]:
    """The functions that ask a store for one run in a loop, themselves or by one of this module."""
    calls = list(_calls(tree, "", looped=False))
    asking = {function for function, call, _ in calls if function and _asks(call.func)}
    while more := {at for at, call, _ in calls if at and _name(call) in asking} - asking:
        asking |= more
    return {
        function
        for function, call, looped in calls
        if looped and (_asks(call.func) or _name(call) in asking)
    }


def _calls(node: ast.AST, function: str, *, looped: bool) -> Iterator[tuple[str, ast.Call, bool]]:
    """Each call, the function that it is in, and whether it is in a loop there."""
    for each in ast.iter_child_nodes(node):
        name, inside = function, looped or type(each) in LOOPS
        if isinstance(each, ast.FunctionDef | ast.AsyncFunctionDef):
            name, inside = each.name, False
        if isinstance(each, ast.Call):
            yield name, each, looped
        yield from _calls(each, name, looped=inside)


def _name(call: ast.Call) -> str:
    """The function of this module, or the method of this object, that is called."""
    on = call.func
    if isinstance(on, ast.Attribute) and getattr(on.value, "id", "") == "self":
        return on.attr
    return getattr(on, "id", "")


def _asks(function: ast.expr) -> bool:
    if not isinstance(function, ast.Attribute) or function.attr not in ONE:
        return False
    on = function.value
    return getattr(on, "attr", getattr(on, "id", "")) in STORES


def modules() -> Iterator[tuple[str, ast.Module]]:
    for room in ROOMS:
        for path in sorted((PACKAGE / room).rglob("*.py")):
            name = ".".join(path.relative_to(PACKAGE).with_suffix("").parts)
            yield name, ast.parse(path.read_text())


def test_no_page_asks_for_one_run_after_the_other() -> None:
    found = {f"{name}.{where}" for name, tree in modules() for where in asked_one_by_one(tree)}
    assert found == IN_LOOPS.keys()


def test_who_lists_runs_row_by_row_has_a_bound() -> None:
    found = {
        name
        for name, tree in modules()
        for node in ast.walk(tree)
        if isinstance(node, ast.Call)
        and isinstance(node.func, ast.Attribute)
        and node.func.attr == "recent"
    }
    assert found == RECENT.keys()


@pytest.mark.parametrize(
    "text",
    [
        "for each in ids:\n    found.append(store.get(each))",
        "x = {each: self._results.history(each) for each in ids}",
        "while ids:\n    if ids:\n        app.results.get(ids.pop())",
        "x = [engine.graphs.root(each) for each in names]",
        "def one(store, a):\n    store.get(a)\ndef all(store, a):\n    [one(store, b) for b in a]",
        "class A:\n def a(self):\n  store.get(1)\n def b(self):\n  for x in y: self.a()",
    ],
)
def test_such_a_loop_is_found(text: str) -> None:
    assert asked_one_by_one(ast.parse(text))


def test_a_single_question_is_none() -> None:
    text = "record = store.get(one)\nfor each in store.get_many(ids):\n    print(each.get('x'))"
    assert not asked_one_by_one(ast.parse(text))
