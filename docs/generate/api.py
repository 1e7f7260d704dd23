"""Writes the signatures and docstrings of the public classes into the pages of the reference.

Usage: python docs/generate/api.py

A page of ``docs/reference/`` says with a comment what belongs in a place, and everything up to the
next ``<!-- end of api -->`` is written anew from the source, which is read, not imported::

    <!-- api: aztask.App -->                       a class or a function, where users import it
    <!-- api: aztask.Task from-aztask -->          a class that you get, without its constructor
    <!-- api: aztask.hooks.Sending fields -->          its description and its fields alone
    <!-- api: aztask.Task without call -->         without a method that only aztask itself calls
    <!-- api: aztask.errors.* -->                  every class of a module, one level deeper

A test compares the pages with what this would write.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterable, Iterator, Sequence
from functools import cache
from pathlib import Path
from typing import TypeAlias

from docstring import Parsed, one_paragraph, parse

ROOT = Path(__file__).parents[2]
PAGES = ROOT / "docs" / "reference"
PLACE = re.compile(
    r"(?P<mark><!-- api: (?P<name>[\w.*]+)(?: (?P<how>from-aztask|fields))?"
    r"(?: without (?P<without>[\w ]+))? -->\n)"
    r".*?(?P<end><!-- end of api -->\n)",
    re.DOTALL,
)
WIDTH = 88
Function: TypeAlias = ast.FunctionDef | ast.AsyncFunctionDef


class Source:
    """One module's text and its top-level definitions."""

    def __init__(self, module: str) -> None:
        path = ROOT.joinpath(*module.split("."))
        path = path / "__init__.py" if path.is_dir() else path.with_suffix(".py")
        self.text = path.read_text(encoding="utf-8")
        self.nodes = {
            node.name: node
            for node in _flat(ast.parse(self.text).body)
            if isinstance(node, ast.ClassDef | Function)
        }
        self.imported = {
            alias.name: node.module or ""
            for node in _flat(ast.parse(self.text).body)
            if isinstance(node, ast.ImportFrom)
            for alias in node.names
        }
        self.constants = {
            self.segment(node.target): self.segment(node.value)
            for node in ast.parse(self.text).body
            if isinstance(node, ast.AnnAssign) and node.value is not None
        }

    def segment(self, node: ast.AST) -> str:
        """The text of a node, on one line."""
        return " ".join((ast.get_source_segment(self.text, node) or "").split())


def _flat(body: Iterable[ast.stmt]) -> Iterator[ast.stmt]:
    """Statements, those under an ``if`` included."""
    for node in body:
        yield node
        if isinstance(node, ast.If):
            yield from _flat(node.body)


@cache
def source(module: str) -> Source:
    """The module, read once."""
    return Source(module)


# -- signatures ------------------------------------------------------------------------------


def signature(code: Source, node: Function, name: str, *, method: bool) -> str:
    """``name(parameters) -> type``, over several lines where it is long."""
    parts = list(_parameters(code, node))
    if method and not (node.args.args and node.args.args[0].annotation):  # it says for which class
        parts = parts[1:]
    returns = ""
    if node.returns is not None and node.name != "__init__":
        returns = f" -> {code.segment(node.returns)}"
    prefix = "await " if isinstance(node, ast.AsyncFunctionDef) else ""
    line = f"{prefix}{name}({', '.join(parts)}){returns}"
    if len(line) <= WIDTH:
        return line
    return "\n".join([f"{prefix}{name}(", *(f"    {part}," for part in parts), f"){returns}"])


def _parameters(code: Source, node: Function) -> Iterator[str]:
    args = node.args
    positional = [*args.posonlyargs, *args.args]
    defaults = [None] * (len(positional) - len(args.defaults)) + list(args.defaults)
    for number, (arg, default) in enumerate(zip(positional, defaults, strict=True), 1):
        yield _parameter(code, arg, default)
        if number == len(args.posonlyargs):
            yield "/"
    if args.vararg and not _refused(args.vararg):
        yield "*" + _parameter(code, args.vararg, None)
    elif args.kwonlyargs:
        yield "*"
    for arg, default in zip(args.kwonlyargs, args.kw_defaults, strict=True):
        yield _parameter(code, arg, default)
    if args.kwarg and not _refused(args.kwarg):
        yield "**" + _parameter(code, args.kwarg, None)


def _refused(arg: ast.arg) -> bool:
    """Whether the parameter only exists to raise an error that says what to write instead."""
    return arg.annotation is not None and ast.unparse(arg.annotation) == "Never"


def _parameter(code: Source, arg: ast.arg, default: ast.expr | None) -> str:
    text = f"{arg.arg}: {code.segment(arg.annotation)}" if arg.annotation else arg.arg
    return text if default is None else f"{text} = {code.segment(default)}"


def _names(node: Function) -> list[str]:
    args = node.args
    every = [*args.posonlyargs, *args.args, *args.kwonlyargs, args.vararg, args.kwarg]
    named = [arg for arg in every if arg is not None and arg.arg != "self"]
    return [arg.arg for arg in named if not _refused(arg)]


# -- entries ---------------------------------------------------------------------------------


def entry(name: str, *, how: str | None = None, without: Sequence[str] = ()) -> str:
    """The section of a class or a function, or of all classes of a module.

    how, without: as above. Raises ValueError if `without` names a method that does not exist.
    """
    module, _, last = name.rpartition(".")
    code = source(module)
    if last == "*":
        classes = [each for each in code.nodes.values() if isinstance(each, ast.ClassDef)]
        return "".join(_class(code, each, how, 3) for each in classes)
    while last not in code.nodes:
        code = source(code.imported[last])
    node = code.nodes[last]
    if isinstance(node, ast.ClassDef):
        return _class(code, node, how, 2, without)
    return _function(code, [node], node.name, 2, method=False)


def _class(
    code: Source, node: ast.ClassDef, how: str | None, level: int, without: Sequence[str] = ()
) -> str:
    fields = [each for each in node.body if _is_field(each)]
    typed = any("TypedDict" in code.segment(base) for base in node.bases)
    init = next((each for each in _methods(node) if each.name == "__init__"), None)
    shown = init if how is None else None
    inner = parse(ast.get_docstring(shown), _names(shown)) if shown else Parsed("", {}, "")
    names = [code.segment(each.target) for each in fields]  # type: ignore[attr-defined]
    # where the constructor describes its parameters, such names in the class are attributes
    names += _names(shown) if shown and not inner.parameters else []
    parsed = parse(ast.get_docstring(node), names)
    parts = [f"{'#' * level} `{node.name}`", _bases(code, node)]
    if shown:
        parts.append(_text(signature(code, shown, node.name, method=True)))
    parts.append(parsed.lead)
    if shown:
        described = {**parsed.parameters, **inner.parameters}
        parts += [inner.lead, _list(described.items()), inner.tail]
    elif fields:
        parts.append(_fields(code, fields, parsed, options=typed))
    parts += [parsed.tail, _members(code, node)]
    if how != "fields":
        parts += [_properties(code, node), *_public_methods(code, node, level + 1, without)]
    return "".join(f"{part}\n\n" for part in parts if part)


def _is_field(node: ast.stmt) -> bool:
    return (
        isinstance(node, ast.AnnAssign)
        and isinstance(node.target, ast.Name)
        and not node.target.id.startswith("_")
    )


def _methods(node: ast.ClassDef) -> Iterator[Function]:
    return (each for each in node.body if isinstance(each, Function))


def _decorated(node: ast.ClassDef | Function, name: str) -> bool:
    texts = [ast.unparse(each) for each in node.decorator_list]
    return any(text.partition("(")[0].split(".")[-1] == name for text in texts)


def _is_property(node: Function) -> bool:
    return _decorated(node, "property") or _decorated(node, "cached_property")


def _bases(code: Source, node: ast.ClassDef) -> str:
    """The base of an error; what other classes inherit from says nothing to their users."""
    bases = [code.segment(base) for base in node.bases]
    known = [base for base in bases if base in code.nodes or base == "Exception"]
    return f"Subclass of {', '.join(f'`{base}`' for base in known)}." if known else ""


def _fields(code: Source, fields: Iterable[ast.stmt], parsed: Parsed, *, options: bool) -> str:
    rows = []
    for each in fields:
        assert isinstance(each, ast.AnnAssign)
        name = code.segment(each.target)
        default, what = _default(code, each.value)
        what = what or parsed.parameters.get(name, "")
        shown = f", default `{default}`" if default else ""
        rows.append(
            f"* `{name}` (`{code.segment(each.annotation)}`{shown}){': ' + what if what else ''}"
        )
    heading = "Options, all of them optional:" if options else "Fields:"
    return f"{heading}\n\n" + "\n".join(rows)


def _default(code: Source, value: ast.expr | None) -> tuple[str, str]:
    """A field's default as it is shown, and its description where the field itself has one."""
    if value is None:
        return "", ""
    if isinstance(value, ast.Call):
        kind = code.segment(value.func)
        if kind == "field":
            given = {each.arg: code.segment(each.value) for each in value.keywords}
            factory = given.get("default_factory", "")
            return given.get("default") or {"dict": "{}"}.get(factory, f"{factory}()"), ""
        if kind == "inherited":
            return "None", "overrides the app's setting of the same name."
        if kind == "setting":
            return code.segment(value.args[0]), str(ast.literal_eval(value.args[3]))
    shown = code.segment(value)
    return code.constants.get(shown, shown), ""


def _members(code: Source, node: ast.ClassDef) -> str:
    """The members of an enumeration."""
    if "Enum" not in map(code.segment, node.bases):
        return ""
    members = [each for each in node.body if isinstance(each, ast.Assign)]
    return "Members: " + ", ".join(f"`{code.segment(each.targets[0])}`" for each in members) + "."


def _list(described: Iterable[tuple[str, str]]) -> str:
    return "\n".join(f"* `{name}`: {text}" for name, text in described)


def _properties(code: Source, node: ast.ClassDef) -> str:
    settable = {each.name for each in _methods(node) if _decorated(each, "setter")}
    rows = []
    for each in _methods(node):
        if _is_property(each) and not each.name.startswith("_"):
            note = ", can be assigned" if each.name in settable else ""
            text = one_paragraph(parse(ast.get_docstring(each)).lead)
            kind = code.segment(each.returns) if each.returns else "Any"
            rows.append(f"* `{each.name}` (`{kind}`{note}): {text}")
    return "Properties:\n\n" + "\n".join(rows) if rows else ""


def _public_methods(
    code: Source, node: ast.ClassDef, level: int, without: Sequence[str], title: str = ""
) -> Iterator[str]:
    several: dict[str, list[Function]] = {}
    for each in _methods(node):
        public = each.name == "__call__" or not each.name.startswith("_")
        if public and not _is_property(each) and not _decorated(each, "setter"):
            several.setdefault(each.name, []).append(each)
    for name in without:
        if several.pop(name, None) is None:
            raise ValueError(f"{node.name} has no public method {name} to leave out")
    for name, nodes in several.items():
        yield _function(code, nodes, f"{title or node.name}.{name}", level, method=True).strip()
    for base in map(code.segment, node.bases):
        if base.startswith(node.name):  # a part of the class in a file of its own
            part = source(code.imported[base])
            inner = part.nodes[base]
            yield from _public_methods(part, inner, level, (), node.name)  # type: ignore[arg-type]


def _function(code: Source, nodes: list[Function], title: str, level: int, *, method: bool) -> str:
    """The section of a function. nodes: its overloads, then the function itself."""
    last = nodes[-1]
    static = _decorated(last, "staticmethod")
    shown = nodes[:-1] or [last]
    lines = [signature(code, each, each.name, method=method and not static) for each in shown]
    parsed = parse(ast.get_docstring(last), _names(last))
    note = next((n for n in ("contextmanager", "fixture") if _decorated(last, n)), "")
    kind = {"contextmanager": "A context manager.", "fixture": "A pytest fixture."}.get(note, "")
    parts = [
        f"{'#' * level} `{title}`",
        _text("\n".join(lines)),
        kind,
        parsed.lead,
        _list(parsed.parameters.items()),
        parsed.tail,
    ]
    return "".join(f"{part}\n\n" for part in parts if part)


def _text(code: str) -> str:
    return f"```text\n{code}\n```"


# -- pages -----------------------------------------------------------------------------------


def page(text: str) -> str:
    """The page with its generated places written anew."""

    def write(match: re.Match[str]) -> str:
        body = entry(match["name"], how=match["how"], without=(match["without"] or "").split())
        return f"{match['mark']}\n{body}{match['end']}"

    return PLACE.sub(write, text)


def stale() -> list[Path]:
    """The pages that differ from what this would write."""
    pages = sorted(PAGES.glob("*.md"))
    return [path for path in pages if path.read_text("utf-8") != page(path.read_text("utf-8"))]


if __name__ == "__main__":
    for path in stale():
        path.write_text(page(path.read_text(encoding="utf-8")), encoding="utf-8")
