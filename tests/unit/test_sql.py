"""Statements of the database are built from constants only, never from data.

Ruff's S608 flags every statement that is built from parts, so it is off for the two packages that
write SQL (pyproject.toml). This test looks at the parts: data always travels as a parameter.
"""

import ast
import re
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[2] / "aztask"
FOLDERS = ("queues/engine", "stores/records/local")
SQL = re.compile(r"\b(SELECT|INSERT|UPDATE|DELETE|WHERE|VALUES|ORDER BY|LIMIT)\b")
BUILDERS = {"format", "join", "replace"}
UNKNOWN = ast.Pass()


class Names(ast.NodeVisitor):
    """What every name of a module may be bound to."""

    def __init__(self, tree):
        self.bound = {}
        self.functions = {}
        self.calls = []
        self.visit(tree)
        for call in self.calls:
            self._pass(call)

    def _bind(self, target, value):
        if isinstance(target, ast.Name):
            self.bound.setdefault(target.id, []).append(value)

    def visit_Assign(self, node):
        for target in node.targets:
            self._bind(target, node.value)
        self.generic_visit(node)

    def visit_AnnAssign(self, node):
        self._bind(node.target, node.value)
        self.generic_visit(node)

    def visit_For(self, node):
        self._bind(node.target, node.iter)
        self.generic_visit(node)

    def visit_comprehension(self, node):
        self._bind(node.target, node.iter)
        self.generic_visit(node)

    def visit_FunctionDef(self, node):
        self.functions[node.name] = [each.arg for each in node.args.args if each.arg != "self"]
        self.generic_visit(node)

    def visit_Call(self, node):
        self.calls.append(node)
        self.generic_visit(node)

    def _pass(self, call):
        name = getattr(call.func, "attr", getattr(call.func, "id", None))
        for parameter, value in zip(self.functions.get(name, ()), call.args, strict=False):
            self.bound.setdefault(parameter, []).append(value)

    def constant(self, node):
        """Whether the text of `node` is fixed when the module is imported."""
        return node is not UNKNOWN and all(map(self.constant, self._parts(node)))

    def _parts(self, node):
        """The nodes that decide the text of this one."""
        match node:
            case ast.Constant():
                parts = []
            case ast.Name(id=name):
                parts = [] if name.isupper() else self.bound.get(name, [UNKNOWN])
            case ast.JoinedStr(values=parts) | ast.Tuple(elts=parts):
                pass
            case ast.FormattedValue(value=value) | ast.GeneratorExp(elt=value):
                parts = [value]
            case ast.BinOp(left=left, op=ast.Add(), right=right):
                parts = [left, right]
            case ast.IfExp(body=body, orelse=other):
                parts = [body, other]
            case ast.Call(func=ast.Attribute(value=text, attr=name), args=arguments, keywords=[]):
                parts = [text, *arguments] if name in BUILDERS else [UNKNOWN]
            case _:
                parts = [UNKNOWN]
        return parts


def is_sql(node):
    """Whether `node` builds a text that holds SQL from parts."""
    built = isinstance(node, ast.JoinedStr | ast.BinOp) or (
        isinstance(node, ast.Call) and getattr(node.func, "attr", None) in BUILDERS
    )
    texts = [each.value for each in ast.walk(node) if isinstance(each, ast.Constant)]
    return built and any(isinstance(text, str) and SQL.search(text) for text in texts)


def built_from_data(code):
    """(statements that are built from parts, those of them that hold something else)."""
    tree = ast.parse(code)
    names = Names(tree)
    found = [node for node in ast.walk(tree) if is_sql(node)]
    return len(found), [ast.unparse(node) for node in found if not names.constant(node)]


def test_no_statement_holds_data():
    number = 0
    for folder in FOLDERS:
        for path in sorted((PACKAGE / folder).glob("*.py")):
            built, wrong = built_from_data(path.read_text(encoding="utf-8"))
            assert wrong == [], path
            number += built
    assert number > 40


def test_the_statements_of_rows_are_built_in_one_place_from_names_that_are_checked():
    """`tests/contract/test_contract_rows.py` holds that a layout has identifiers alone."""
    paths = (PACKAGE / "stores" / "local").glob("*.py")
    built = {path.name: built_from_data(path.read_text(encoding="utf-8")) for path in paths}
    assert built.pop("rows.py")[0] > 5
    assert [each for each in built.values() if each[0]] == []


@pytest.mark.parametrize(
    "code",
    [
        'def f(name): execute(f"SELECT 1 FROM t WHERE x = {name}")',
        'def f(name): execute("SELECT 1 FROM t WHERE x = " + name)',
        'def f(name): execute("SELECT 1 FROM t WHERE x = %s" % name)',
        'def f(name): execute("DELETE FROM t WHERE x = {}".format(name))',
        'def f(name): execute(f"SELECT 1 FROM t LIMIT {len(name)}")',
        'def g(where): execute(f"SELECT 1 FROM t {where}")\ndef f(name): g(name)',
    ],
)
def test_data_in_a_statement_is_found(code):
    assert len(built_from_data(code)[1]) == 1


def test_a_parameter_that_every_caller_fixes_is_constant():
    code = 'def g(where): execute(f"SELECT 1 FROM t {where}")\ng("WHERE x = 1")\ng(WHERE)'
    assert built_from_data(code) == (1, [])
