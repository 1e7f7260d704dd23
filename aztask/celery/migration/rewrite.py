"""The mechanical part of a move, as a diff, with a comment where a person must decide.

Rules
1. Only what the check has found is touched, and of that only what is certain.
2. A use is rewritten if the new code means the same whatever the values are. Every other use gets a
   comment above its statement, with what the check says about it.
3. A second run changes nothing: what was rewritten is no longer Celery's, and a comment that is
   there is not written again.
4. A name of aztask comes only into modules that use it for nothing else.
5. What a program wrote that Python cannot parse is thrown away, and the file is named.
"""

from __future__ import annotations

import ast
import difflib
import keyword
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final, NamedTuple, TypeVar

import libcst as cst
import libcst.matchers as m
from libcst.helpers import get_full_name_for_node
from libcst.metadata import MetadataWrapper, PositionProvider

from aztask.celery.migration.answers import NOT_NEEDED, Unread, Use
from aztask.celery.migration.project import read_project

MARK: Final = "# aztask: "

_KEPT: Final = frozenset({"name", "queue", "expires", "time_limit", "soft_time_limit"})
"""Options of a task that mean the same in aztask."""

_RETRIES: Final = {
    "autoretry_for": "retry_on",
    "dont_autoretry_for": "give_up_on",
    "max_retries": "max_retries",
    "retry_backoff_max": "max_delay",
    "retry_jitter": "jitter",
}
_SENT: Final = {
    "countdown": "delay",
    "eta": "eta",
    "expires": "expires",
    "queue": "queue",
    "task_id": "task_id",
}
_REQUEST: Final = {"id": "task_id", "retries": "resubmit_count"}
_NAMES: Final = {
    "celery.Celery": "App",
    "celery.chain": "chain",
    "celery.chord": "chord",
    "celery.group": "group",
}
"""Names that `aztask` has in their place."""

_LOGGER: Final = "celery.utils.log.get_task_logger"
_SAME: Final = ("the same", "`@app.task`")
"""Answers after which nothing needs to be written."""

Statement = TypeVar("Statement", cst.SimpleStatementLine, cst.FunctionDef, cst.ClassDef)


class Rewritten(NamedTuple):
    """One file. before, after: its text; they are equal if nothing is to be changed."""

    path: Path
    before: str
    after: str

    def diff(self) -> str:
        """The change as a unified diff, "" without one."""
        lines = (self.before.splitlines(keepends=True), self.after.splitlines(keepends=True))
        return "".join(difflib.unified_diff(*lines, f"a/{self.path}", f"b/{self.path}"))


def rewrite_project(root: Path) -> tuple[list[Rewritten], list[Unread]]:
    """Rewrite the Python files below `root`, in memory; also what could not be read.

    Raises OSError if `root` itself cannot be read.
    """
    reading = read_project(root)
    by_file: dict[str, list[Use]] = {}
    for use in reading.uses:
        if use.file.endswith(".py"):
            by_file.setdefault(use.file, []).append(use)
    found, unread = [], list(reading.unread)
    for file, uses in by_file.items():
        try:
            with Path(file).open(encoding="utf-8", newline="") as opened:
                before = opened.read()
            found.append(Rewritten(Path(file), before, rewritten(before, uses)))
        except SyntaxError as error:
            reason = f"it would no longer be Python ({error.msg}), so it is left alone"
            unread.append(Unread(file, error.lineno or 1, reason))
        except (OSError, ValueError, RecursionError, cst.ParserSyntaxError) as error:
            unread.append(Unread(file, 1, " ".join(str(error).split())))
    return found, unread


def rewritten(source: str, uses: Iterable[Use]) -> str:
    """The text of a file after the mechanical changes, with comments for the other uses.

    Raises SyntaxError if that text cannot be parsed.
    """
    wrapper = MetadataWrapper(cst.parse_module(source))
    rewriter = Rewriter(list(uses), names_bound_in(ast.parse(source)))
    module = wrapper.visit(rewriter)
    code = rewriter.with_imports(module).code
    ast.parse(code)
    return code


def names_bound_in(tree: ast.Module) -> Counter[str]:
    """How often each name is bound in a module, in whatever way, imports of aztask left out."""
    found: Counter[str] = Counter()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import | ast.ImportFrom):
            if getattr(node, "module", "") != "aztask":
                found.update(
                    each.asname or each.name.partition(".")[0]
                    for each in node.names
                    if isinstance(node, ast.ImportFrom) or each.name != "logging"
                )
        elif isinstance(node, ast.Name) and not isinstance(node.ctx, ast.Load):
            found[node.id] += 1
        elif isinstance(node, ast.arg):
            found[node.arg] += 1
        elif not isinstance(node, ast.alias):  # functions, classes, clauses and patterns
            found[str(getattr(node, "name", ""))] += 1
    return found


class Rewriter(cst.CSTTransformer):
    """Changes one file. Positions are those of the file as it was."""

    METADATA_DEPENDENCIES = (PositionProvider,)

    def __init__(self, uses: Sequence[Use], bound: Mapping[str, int]) -> None:
        """bound: how often each name is bound in the module."""
        super().__init__()
        self._open = {(use.line, use.section, use.name): use for use in uses}
        self._names = {use.name for use in uses if use.section == "names"}
        self._bound = bound
        self._needed: dict[str, set[str]] = {}
        self._renamed: dict[str, str] = {}  # the imports that are replaced, by their last names
        self._contexts: list[set[str]] = []  # of the functions around: names of their contexts
        self._no_variables: set[cst.CSTNode] = set()
        self._raised: set[cst.CSTNode] = set()

    # -- what was found where ----------------------------------------------------------------

    def _lines(self, node: cst.CSTNode) -> range:
        at = self.get_metadata(PositionProvider, node)
        return range(at.start.line, at.end.line + 1)

    def _use(self, node: cst.CSTNode, section: str, name: str) -> Use | None:
        found = (self._open.get((line, section, name)) for line in self._lines(node))
        return next((use for use in found if use is not None and use.sure == "certain"), None)

    def _has(self, node: cst.CSTNode, section: str, name: str) -> bool:
        return self._use(node, section, name) is not None

    def _done(self, node: cst.CSTNode, section: str, *names: str) -> None:
        for line in self._lines(node):
            for name in names:
                self._open.pop((line, section, name), None)

    def _need(self, name: str, module: str = "aztask") -> str:
        self._needed.setdefault(module, set()).add(name)
        return name

    def _is_free(self, name: str) -> bool:
        """Whether the module uses a name of aztask for nothing else (rule 4)."""
        return not self._bound.get(name)

    # -- tasks -------------------------------------------------------------------------------

    def visit_FunctionDef(self, node: cst.FunctionDef) -> None:
        """Note which variables are contexts in its body: the first parameter of a bound task."""
        params = [each.name.value for each in (*node.params.posonly_params, *node.params.params)]
        known = (self._contexts[-1] if self._contexts else set()) - set(params)
        bound = any(_is_bound(self._options(each)) for each in node.decorators)
        self._contexts.append(known | set(params[:1]) if bound else known)
        self._no_variables.add(node.name)

    def _options(self, node: cst.Decorator) -> Mapping[str, cst.Arg]:
        """The options of ``@app.task(...)``; {} if it is something else, or one is not certain."""
        call = node.decorator
        if not isinstance(call, cst.Call) or not isinstance(call.func, cst.Attribute):
            return {}
        given = {each.keyword.value: each for each in call.args if each.keyword is not None}
        sure = all(self._has(node, "task", name) for name in given)
        return given if call.func.attr.value == "task" and sure else {}

    def _is_context(self, node: cst.BaseExpression) -> bool:
        return isinstance(node, cst.Name) and any(
            node.value in each for each in self._contexts[-1:]
        )

    def leave_Decorator(
        self, original_node: cst.Decorator, updated_node: cst.Decorator
    ) -> cst.Decorator:
        """Options of a task: keep, drop or translate them."""
        call = updated_node.decorator
        if not self._options(original_node) or not isinstance(call, cst.Call):
            return updated_node
        given = {each.keyword.value: each for each in call.args if each.keyword is not None}
        func, kept = call.func, [each for each in call.args if each.keyword is None]
        retries = self._retry_policy(original_node, given)
        for name, each in given.items():
            use = self._use(original_node, "task", name)
            if _is_bound({name: each}):
                func = func.with_changes(attr=cst.Name("task_with_context"))
                self._done(original_node, "task", name)
            elif name in _KEPT:
                kept += [] if _is_none(each.value) else [each]
                self._done(original_node, "task", name)
            elif use is None:
                continue  # it is in the policy
            elif use.text.startswith(NOT_NEEDED):
                self._done(original_node, "task", name)
            else:
                kept.append(each)
        return updated_node.with_changes(
            decorator=_call(func, [*kept, *retries]) if kept or retries else func
        )

    def _retry_policy(self, node: cst.Decorator, given: Mapping[str, cst.Arg]) -> list[cst.Arg]:
        """``retry=RetryPolicy(...)`` for a task that Celery retries by itself; else nothing.

        A task without `autoretry_for` is retried where it says so, so that is left to a person.
        """
        if "autoretry_for" not in given or "retry_kwargs" in given:
            return []
        endless = "max_retries" in given and _is_none(given["max_retries"].value)
        if endless or not self._is_free("RetryPolicy"):
            return []
        given = {name: each for name, each in given.items() if not _is_none(each.value)}
        args = [
            _keyword(_RETRIES[name], each.value) for name, each in given.items() if name in _RETRIES
        ]
        backoff = given.get("retry_backoff")
        text = getattr(backoff.value, "value", "") if backoff is not None else "False"
        if text == "True":
            args.append(_keyword("delay", cst.Integer("1")))
        elif text == "False":
            delay = given.get("default_retry_delay")
            args.append(_keyword("delay", delay.value if delay else cst.Integer("180")))
            args.append(_keyword("backoff", cst.Float("1.0")))
        elif text.isdigit():
            args.append(_keyword("delay", cst.Integer(text)))
        else:
            return []
        self._done(node, "task", *_RETRIES, "retry_backoff", "default_retry_delay")
        policy = _call(cst.Name(self._need("RetryPolicy")), args)
        return [_keyword("retry", policy)]

    # -- sends, retries and names ------------------------------------------------------------

    def leave_Call(self, original_node: cst.Call, updated_node: cst.Call) -> cst.BaseExpression:
        """Translate a send or a retry."""
        func = updated_node.func
        if not isinstance(func, cst.Attribute):
            return updated_node
        if func.attr.value == "apply_async" and self._has(original_node, "task", "apply_async"):
            return self._sent(original_node, updated_node, func.value) or updated_node
        if original_node in self._raised and self._has(original_node, "task", "retry"):
            names = [each.keyword.value if each.keyword else "" for each in updated_node.args]
            if set(names) <= {"countdown"} and self._is_free("Retry"):
                self._done(original_node, "task", "retry")
                given = [each.value for each in updated_node.args if not _is_none(each.value)]
                delay = [_keyword("delay", each) for each in given]
                return _call(cst.Name(self._need("Retry")), delay)
        return updated_node

    def visit_Raise(self, node: cst.Raise) -> None:
        """Note a ``raise self.retry(...)``: only there it is a `Retry`, which must be raised."""
        match node.exc:
            case cst.Call(func=cst.Attribute(value=owner, attr=cst.Name(value="retry"))) as call:
                if self._is_context(owner):
                    self._raised.add(call)

    def _sent(
        self, node: cst.Call, call: cst.Call, task: cst.BaseExpression
    ) -> cst.BaseExpression | None:
        """``task.with_options(...).delay(...)``; None if an option is not translated."""
        places = [each for each in call.args if each.keyword is None]
        given = dict(zip(("args", "kwargs", "task_id"), places, strict=False))
        given |= {each.keyword.value: each for each in call.args if each.keyword is not None}
        options = {
            name: each
            for name, each in given.items()
            if name not in ("args", "kwargs") and not _is_none(each.value)
        }
        if (
            any(each.star for each in call.args)
            or len(places) > 3
            or given.keys() - _SENT.keys() - {"args", "kwargs"}
            or {"countdown", "eta"} <= options.keys()
        ):
            return None
        args = [*_spread(given.get("args")), *_spread_names(given.get("kwargs"))]
        self._done(node, "task", "apply_async")
        self._done(node, "send", *given)
        if options:
            named = [_keyword(_SENT[name], each.value) for name, each in options.items()]
            task = _call(cst.Attribute(task, cst.Name("with_options")), named)
        return _call(cst.Attribute(task, cst.Name("delay")), args)

    def leave_Attribute(
        self, original_node: cst.Attribute, updated_node: cst.Attribute
    ) -> cst.BaseExpression:
        """Read from the `Context` what Celery has in the request of ``self``."""
        name, owner = updated_node.attr.value, updated_node.value
        if (
            name in _REQUEST
            and isinstance(owner, cst.Attribute)
            and owner.attr.value == "request"
            and self._is_context(owner.value)
            and self._has(original_node, "request", name)
        ):
            self._done(original_node, "request", name)
            self._done(original_node, "task", "request")
            return cst.Attribute(owner.value, cst.Name(_REQUEST[name]))
        return updated_node

    def visit_Attribute(self, node: cst.Attribute) -> None:
        """Its name is no variable."""
        self._no_variables.add(node.attr)

    def visit_Arg(self, node: cst.Arg) -> None:
        """Nor is that of an argument."""
        if node.keyword is not None:
            self._no_variables.add(node.keyword)

    def leave_Name(
        self, original_node: cst.Name, updated_node: cst.Name
    ) -> cst.Name | cst.Attribute:
        """``Celery(...)``, ``chain(...)`` and the like, wherever they are used."""
        full = self._renamed.get(original_node.value)
        if full is None or original_node in self._no_variables:
            return updated_node
        self._done(original_node, "names", full)
        if full == _LOGGER:
            self._need("", "logging")
            return cst.Attribute(cst.Name("logging"), cst.Name("getLogger"))
        return updated_node.with_changes(value=self._need(_NAMES[full]))

    def visit_Module(self, node: cst.Module) -> None:
        """Find the imports that are replaced, before the uses of their names."""
        for each in m.findall(node, m.ImportFrom()):
            assert isinstance(each, cst.ImportFrom)  # noqa: S101  # `findall` says it of no type
            module = get_full_name_for_node(each.module or cst.Name(""))
            if not each.relative and not isinstance(each.names, cst.ImportStar):
                for alias in each.names:
                    self._find_replaced(f"{module}.{get_full_name_for_node(alias.name)}", alias)

    def _find_replaced(self, full: str, alias: cst.ImportAlias) -> None:
        name = full.rpartition(".")[2]
        new = "logging" if full == _LOGGER else _NAMES.get(full)
        if new is None or alias.asname is not None or full not in self._names:
            return
        # A name that is bound a second time may be another thing where it is used.
        if self._bound.get(name) == 1 and (new == name or self._is_free(new)):
            self._renamed[name] = full

    def leave_ImportFrom(
        self, original_node: cst.ImportFrom, updated_node: cst.ImportFrom
    ) -> cst.ImportFrom | cst.RemovalSentinel:
        """Imports of names that have others in their place; see `with_imports`."""
        module = get_full_name_for_node(original_node.module or cst.Name(""))
        if original_node.relative or isinstance(original_node.names, cst.ImportStar):
            return updated_node
        left = [each for each in original_node.names if not self._replaces(module, each)]
        if len(left) == len(original_node.names):
            return updated_node
        if not left:
            return cst.RemoveFromParent()
        left[-1] = left[-1].with_changes(comma=cst.MaybeSentinel.DEFAULT)
        return updated_node.with_changes(names=left)

    def _replaces(self, module: str | None, each: cst.ImportAlias) -> bool:
        full = f"{module}.{get_full_name_for_node(each.name)}"
        return self._renamed.get(full.rpartition(".")[2]) == full

    # -- comments ----------------------------------------------------------------------------

    def leave_SimpleStatementLine(
        self, original_node: cst.SimpleStatementLine, updated_node: cst.SimpleStatementLine
    ) -> cst.SimpleStatementLine:
        """A comment for each use that is left."""
        return self._commented(updated_node, self._lines(original_node))

    def leave_FunctionDef(
        self, original_node: cst.FunctionDef, updated_node: cst.FunctionDef
    ) -> cst.FunctionDef:
        """Comments for its decorators and its first lines."""
        self._contexts.pop()
        return self._commented(updated_node, self._head(original_node))

    def leave_ClassDef(
        self, original_node: cst.ClassDef, updated_node: cst.ClassDef
    ) -> cst.ClassDef:
        """Comments for its decorators, its bases and what it defines of Celery."""
        return self._commented(updated_node, self._head(original_node))

    def _head(self, node: cst.FunctionDef | cst.ClassDef) -> range:
        first = self._lines(node.decorators[0] if node.decorators else node).start
        return range(first, max(first + 1, self._lines(node.body).start))

    def _commented(self, node: Statement, lines: range) -> Statement:
        there = {each.comment.value for each in node.leading_lines if each.comment is not None}
        found: dict[str, cst.EmptyLine] = {}
        for key in [key for key in self._open if key[0] in lines]:
            use = self._open.pop(key)
            text = f"{MARK}{use.name}: {use.text.replace('`', '')}"
            if not use.text.startswith(_SAME) and text not in there:
                found[text] = cst.EmptyLine(comment=cst.Comment(text))
        if not found:
            return node
        return node.with_changes(leading_lines=[*node.leading_lines, *found.values()])

    # -- imports -----------------------------------------------------------------------------

    def with_imports(self, module: cst.Module) -> cst.Module:
        """The module with the imports that the new names need, behind its first ones."""
        lines = [
            f"import {name}" if names == {""} else f"from {name} import {', '.join(sorted(names))}"
            for name, names in sorted(self._needed.items(), reverse=True)
        ]
        wanted = [line for line in lines if line not in module.code.splitlines()]
        body = list(module.body)
        at = next((n for n, each in enumerate(body) if not _may_come_first(each)), len(body))
        body[at:at] = [cst.parse_statement(line) for line in wanted]
        return module.with_changes(body=body)


def _may_come_first(statement: cst.CSTNode) -> bool:
    """Whether a statement is a docstring, or an import from the future."""
    if not isinstance(statement, cst.SimpleStatementLine):
        return False
    first = statement.body[0]
    if isinstance(first, cst.Expr):
        return isinstance(first.value, cst.SimpleString | cst.ConcatenatedString)
    return isinstance(first, cst.ImportFrom) and getattr(first.module, "value", "") == "__future__"


def _is_none(value: cst.BaseExpression) -> bool:
    return isinstance(value, cst.Name) and value.value == "None"


def _is_bound(given: Mapping[str, cst.Arg]) -> bool:
    """Whether these options of a task have ``bind=True``."""
    return "bind" in given and getattr(given["bind"].value, "value", "") == "True"


def _keyword(name: str, value: cst.BaseExpression) -> cst.Arg:
    equal = cst.AssignEqual(cst.SimpleWhitespace(""), cst.SimpleWhitespace(""))
    return cst.Arg(value, keyword=cst.Name(name), equal=equal)


def _call(func: cst.BaseExpression, args: Sequence[cst.Arg]) -> cst.Call:
    plain = [each.with_changes(comma=cst.MaybeSentinel.DEFAULT) for each in args]
    return cst.Call(func, plain)


def _spread(given: cst.Arg | None) -> Iterator[cst.Arg]:
    """The positional arguments that a tuple or list gives."""
    if given is None or _is_none(given.value):
        return
    if isinstance(given.value, cst.Tuple | cst.List):
        for each in given.value.elements:
            star: Any = "*" if isinstance(each, cst.StarredElement) else ""
            yield cst.Arg(each.value, star=star)
    else:
        value = given.value
        if isinstance(value, cst.GeneratorExp) and not value.lpar:
            value = value.with_changes(lpar=[cst.LeftParen()], rpar=[cst.RightParen()])
        yield cst.Arg(value, star="*")


def _spread_names(given: cst.Arg | None) -> Iterator[cst.Arg]:
    """The keyword arguments that a dict gives."""
    if given is None or _is_none(given.value):
        return
    elements = given.value.elements if isinstance(given.value, cst.Dict) else []
    names = [
        each.key.evaluated_value
        for each in elements
        if isinstance(each, cst.DictElement) and isinstance(each.key, cst.SimpleString)
    ]
    texts = {
        name: None
        for name in names
        if isinstance(name, str) and name.isidentifier() and not keyword.iskeyword(name)
    }
    if isinstance(given.value, cst.Dict) and len(texts) == len(elements):
        for name, each in zip(texts, elements, strict=True):
            yield _keyword(name, each.value)
    else:
        yield cst.Arg(given.value, star="**")
