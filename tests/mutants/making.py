"""Makes the mutants of a module: values that say what to change, where, and how to name it.

Most operators are mutmut's. Added here: conditions that are always true or false, terms of
conditions and whole statements removed, keyword arguments dropped, ``case`` blocks that never
match, min for max, and changes of SQL. Left out are those that only crash: positional arguments
dropped, local names set to None.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from difflib import SequenceMatcher

import libcst as cst
import libcst.matchers as m
from libcst.metadata import MetadataWrapper, PositionProvider, WhitespaceInclusivePositionProvider
from mutmut.mutation import mutators

from .modules import Source
from .sql import is_sql, sql_changes

OPERATORS = (
    (cst.BaseNumber, mutators.operator_number),
    (cst.Name, mutators.operator_name),
    (cst.AugAssign, mutators.operator_augmented_assignment),
    (cst.UnaryOperation, mutators.operator_remove_unary_ops),
    (cst.Call, mutators.operator_symmetric_string_methods_swap),
    (cst.Call, mutators.operator_unsymmetrical_string_methods_swap),
    (cst.Lambda, mutators.operator_lambda),
    (cst.CSTNode, mutators.operator_keywords),
    (cst.CSTNode, mutators.operator_swap_op),
    (cst.IfExp, mutators.operator_if_exp),
)
WEAKER = {cst.And, cst.Or, cst.Is, cst.IsNot, cst.In, cst.NotIn, cst.Equal, cst.NotEqual, cst.Not}
"""Turned round, a condition as a whole says no more than the same one always true or false, and
``and`` for ``or`` no more than one of its terms alone."""
SWAPPED = {"min": "max", "max": "min", "any": "all", "all": "any"}

FOR_PEOPLE = m.Call(func=m.Attribute(value=m.Name("logger"))) | m.Call(
    func=m.Attribute(value=m.Name("warnings"))
)
FAIL_POINT = m.Call(func=m.Name("hit"))
"""Where the tests of crashes kill the process: nothing happens there otherwise."""

DECLARATION = (
    m.AnnAssign(annotation=m.Annotation(m.Name("TypeAlias")))
    | m.Assign(value=m.Call(func=m.Name("TypeVar")))
    | m.Assign(targets=[m.AssignTarget(m.Name("logger"))])
    | m.Assign(targets=[m.AssignTarget(m.Name("__all__"))])
)
ASIDE = m.Arg(keyword=m.Name("strict")) | m.Arg(m.SimpleString(), keyword=m.Name("name"))
"""``zip(..., strict=True)`` asserts what holds anyway, and names of threads are for people."""


@dataclass(frozen=True)
class Mutant:
    """One change of a module.

    function: where it is, dotted; "" outside of functions. before, after: the changed lines,
    without indentation. start, end: the offsets that `text` replaces. first, last: the lines of
    the statement. at_import: whether it runs when the module is imported. same: counts mutants of
    one function that look alike, from 1.
    """

    source: Source
    function: str
    before: str
    after: str
    start: int
    end: int
    text: str
    first: int
    last: int
    at_import: bool
    same: int = 1

    @property
    def key(self) -> tuple[str, str, str, str, int]:
        """Names it, wherever its line moves within the function."""
        return self.source.short, self.function, self.before, self.after, self.same

    @property
    def code(self) -> str:
        """The whole module with the change."""
        return _changed(self.source.text, self.start, self.end, self.text)


def mutants_of(source: Source) -> list[Mutant]:
    """All of them, in the order of the source."""
    wrapper = MetadataWrapper(cst.parse_module(source.text), unsafe_skip_copy=True)
    visitor = _Visitor(source, wrapper.module)
    wrapper.visit(visitor)
    seen: Counter[tuple[str, str, str]] = Counter()
    made = []
    for start, end, text, function, first, last, at_import in sorted(visitor.found):
        before, after = _lines(source.text, start, end, text)
        if before == after or not _compiles(_changed(source.text, start, end, text)):
            continue
        seen[function, before, after] += 1
        same = seen[function, before, after]
        made.append(
            Mutant(source, function, before, after, start, end, text, first, last, at_import, same)
        )
    return made


def _changed(source: str, start: int, end: int, text: str) -> str:
    return source[:start] + text + source[end:]


def _compiles(code: str) -> bool:
    try:
        compile(code, "mutant", "exec", dont_inherit=True)
    except SyntaxError:
        return False
    return True


def _lines(source: str, start: int, end: int, text: str) -> tuple[str, str]:
    """The lines before and after, each as one line without indentation."""
    first = source.rfind("\n", 0, start) + 1
    last = source.find("\n", end)
    old = source[first:last]
    new = source[first:start] + text + source[end:last]
    rows = [[_bare(line) for line in part.splitlines()] for part in (old, new)]
    changes = [
        each
        for each in SequenceMatcher(None, *rows, autojunk=False).get_opcodes()
        if each[0] != "equal"
    ]
    if not changes:
        return "", ""
    low, high = changes[0], changes[-1]
    return " ".join(rows[0][low[1] : high[2]]), " ".join(rows[1][low[3] : high[4]])


def _bare(line: str) -> str:
    """Without indentation and comment: a mark survives when the comment is reworded."""
    return re.sub(r"\s{2}#.*$", "", line).strip()


class _Visitor(cst.CSTVisitor):
    """Collects (start, end, text, function, first line, last line, at import) of every change."""

    METADATA_DEPENDENCIES = (PositionProvider, WhitespaceInclusivePositionProvider)

    def __init__(self, source: Source, module: cst.Module) -> None:
        super().__init__()
        self.found: list[tuple[int, int, str, str, int, int, bool]] = []
        self._module = module
        self._starts = [0]
        for line in source.text.splitlines(keepends=True):
            self._starts.append(self._starts[-1] + len(line))
        self._source = source.text
        self._scope: list[str] = []
        self._bodies = 0
        self._statements: list[tuple[int, int]] = []
        self._conditions: set[cst.CSTNode] = set()
        self._function_bodies: set[cst.CSTNode] = set()
        self._bases: set[cst.CSTNode] = set()

    def on_visit(self, node: cst.CSTNode) -> bool:
        if _left_alone(node) or node in self._bases:
            return False
        if isinstance(node, cst.If | cst.CompIf | cst.While | cst.IfExp):
            self._conditions.add(node.test)
        if isinstance(node, cst.FunctionDef | cst.ClassDef):
            self._scope.append(node.name.value)
            if isinstance(node, cst.FunctionDef):
                self._function_bodies.add(node.body)
            else:  # `Stage[A | None]` is for the type checker, like an annotation
                self._bases.update(node.bases)
        if self._is_body(node):
            self._bodies += 1
        if (span := self._statement(node)) is not None:
            self._statements.append(span)
        if not self._is_weak(node):
            for changed in _node_changes(node):
                self._add(node, self._module.code_for_node(changed))
        for target, text in self._text_changes(node):
            self._add(target, text)
        if isinstance(node, cst.SimpleString | cst.FormattedStringText):
            self._add_sql(node)
        # the inner parts of a raise are text for people; that it raises is not
        return not isinstance(node, cst.Raise)

    def on_leave(self, original_node: cst.CSTNode) -> None:
        if self._is_body(original_node):
            self._bodies -= 1
        if isinstance(original_node, cst.FunctionDef | cst.ClassDef) and self._scope:
            self._scope.pop()
        if self._statement(original_node) is not None:
            self._statements.pop()

    def _is_body(self, node: cst.CSTNode) -> bool:
        """Whether it runs when a function is called, not when it is defined."""
        return node in self._function_bodies or isinstance(node, cst.Lambda)

    def _is_weak(self, node: cst.CSTNode) -> bool:
        if isinstance(node, cst.BooleanOperation):
            return True
        if type(node) in WEAKER:  # an operator: its comparison is the condition, or a part of it
            return any(node in _operators(condition) for condition in self._conditions)
        if isinstance(node, cst.ComparisonTarget):
            return type(node.operator) in WEAKER and any(
                node in getattr(condition, "comparisons", ()) for condition in self._conditions
            )
        return isinstance(node, cst.UnaryOperation) and node in self._conditions

    def _statement(self, node: cst.CSTNode) -> tuple[int, int] | None:
        """The lines of a statement, of a compound one only its head."""
        if isinstance(node, cst.SimpleStatementLine):
            span = self.get_metadata(PositionProvider, node)
            return span.start.line, span.end.line
        if isinstance(node, cst.BaseCompoundStatement):
            start = self.get_metadata(PositionProvider, node).start.line
            body = (
                self.get_metadata(PositionProvider, node.body, None)
                if hasattr(node, "body")
                else None
            )
            return start, max(start, body.start.line - 1) if body else start
        return None

    def _text_changes(self, node: cst.CSTNode) -> Iterator[tuple[cst.CSTNode, str]]:
        if isinstance(node, cst.If | cst.CompIf):
            yield node.test, "False"
            yield node.test, "True"
        elif isinstance(node, cst.While) and not m.matches(node.test, m.Name("True")):
            yield node.test, "False"
        elif isinstance(node, cst.BooleanOperation):
            yield node, self._module.code_for_node(node.left)
            yield node, self._module.code_for_node(node.right)
        elif isinstance(node, cst.Return) and node.value is None:
            yield node, "pass"
        elif isinstance(node, cst.MatchCase) and node.guard is None:
            yield node.pattern, f"{self._module.code_for_node(node.pattern)} if False"
        elif _is_removable(node):
            yield node, "pass"

    def _add(self, node: cst.CSTNode, text: str) -> None:
        span = self.get_metadata(WhitespaceInclusivePositionProvider, node)
        self._add_span(self._offset(span.start), self._offset(span.end), text)

    def _add_sql(self, node: cst.SimpleString | cst.FormattedStringText) -> None:
        span = self.get_metadata(PositionProvider, node)
        start, end = self._offset(span.start), self._offset(span.end)
        if not is_sql(self._source[start:end]):
            return
        for low, high, text in sql_changes(self._source[start:end]):
            self._add_span(start + low, start + high, text)

    def _add_span(self, start: int, end: int, text: str) -> None:
        first, last = self._statements[-1] if self._statements else (1, 1)
        place = ".".join(self._scope)
        self.found.append((start, end, text, place, first, last, not self._bodies))

    def _offset(self, position: cst.metadata.CodePosition) -> int:
        return self._starts[position.line - 1] + position.column


def _operators(condition: cst.CSTNode) -> list[cst.CSTNode]:
    return [each.operator for each in getattr(condition, "comparisons", ())]


def _left_alone(node: cst.CSTNode) -> bool:
    """What is not changed, with all that is in it."""
    kinds = cst.Annotation | cst.Decorator | cst.Assert | cst.Import | cst.ImportFrom
    if isinstance(node, kinds) or m.matches(node, FOR_PEOPLE | FAIL_POINT):
        return True
    if isinstance(node, cst.Expr):
        return isinstance(node.value, cst.BaseString) or m.matches(
            node.value, FOR_PEOPLE | FAIL_POINT
        )
    return m.matches(node, DECLARATION | ASIDE)


def _node_changes(node: cst.CSTNode) -> Iterator[cst.CSTNode]:
    for kind, operator in OPERATORS:
        if isinstance(node, kind):
            yield from operator(node)  # type: ignore[arg-type]
    if isinstance(node, cst.Assign | cst.AnnAssign) and _is_kept(node):
        yield from mutators.operator_assignment(node)
    elif isinstance(node, cst.Call):
        yield from _call_changes(node)
    elif isinstance(node, cst.SimpleString) and not re.search(r"\s", node.value):
        yield from list(mutators.operator_string(node))[: 0 if is_sql(node.value) else 1]


def _is_removable(node: cst.CSTNode) -> bool:
    """Whether it is a statement that can go: a ``raise``, or a call for its effect.

    The ``...`` of a protocol's method does nothing.
    """
    if isinstance(node, cst.Expr):
        return not isinstance(node.value, cst.Yield | cst.BaseString | cst.Ellipsis)
    return isinstance(node, cst.Raise)


def _is_kept(node: cst.Assign | cst.AnnAssign) -> bool:
    """Whether the assignment is to an attribute, and not of a parameter or of True or False.

    Other names without their value only crash, and True and False are changed into each other.
    """
    if node.value is None or isinstance(node.value, cst.Name):
        return False
    targets = (
        [node.target] if isinstance(node, cst.AnnAssign) else [each.target for each in node.targets]
    )
    return all(isinstance(target, cst.Attribute) for target in targets)


def _call_changes(node: cst.Call) -> Iterator[cst.Call]:
    if isinstance(node.func, cst.Name) and node.func.value in SWAPPED:
        yield node.with_changes(func=cst.Name(SWAPPED[node.func.value]))
    for n, argument in enumerate(node.args):
        if argument.keyword is not None and not m.matches(argument, ASIDE):
            yield node.with_changes(args=[*node.args[:n], *node.args[n + 1 :]])
