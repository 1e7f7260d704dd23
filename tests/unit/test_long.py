"""The list of the tests that take long names tests that exist, and no test that `tox` needs."""

import ast
from pathlib import Path

import long

ROOT = Path(__file__).parents[2]


def test_each_one_exists():
    functions: dict[str, set[str]] = {}
    for name in long.ids():
        file, *parts = name.partition("[")[0].split("::")
        if file not in functions:
            tree = ast.parse((ROOT / file).read_text(encoding="utf-8"))
            functions[file] = {
                node.name for node in tree.body if isinstance(node, ast.FunctionDef | ast.ClassDef)
            } | {
                target.id
                for node in tree.body
                if isinstance(node, ast.Assign)
                for target in node.targets
                if isinstance(target, ast.Name)
            }
        assert parts[0] in functions[file], name


def test_what_reads_the_source_is_always_run():
    assert not [name for name in long.ids() if name.startswith("tests/unit/test_")]


def test_they_are_marked(request):
    here = request.node.nodeid
    assert here not in long.ids()
    assert request.node.get_closest_marker("long") is None
    marked = [item for item in request.session.items if item.get_closest_marker("long")]
    assert all(item.nodeid in long.ids() for item in marked)
