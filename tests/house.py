"""The measures of the house: rooms, files, corridors. See CONTRIBUTING.md, "The house".

Usage: python tests/house.py [--brokers]     prints every figure
`tests/unit/test_house.py` holds them: none may become worse than what `LIMITS` there says.

--brokers: the way of one ``.delay()`` on Azurite and on the emulator too, which are started for it.
"""

from __future__ import annotations

import ast
import io
import json
import os
import subprocess
import sys
import tempfile
import tokenize
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "aztask"
PORTED = ("worker", "workflows", "schedules", "sending", "stores")
"""Packages whose constructors take objects with names, and no callables."""

NO_CODE = {
    *(tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE),
    *(tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER),
}


@dataclass
class File:
    """One source file: `name` is dotted, without the package's own name."""

    name: str
    text: str
    package: bool
    needs: set[str] = field(default_factory=set)

    @cached_property
    def tree(self) -> ast.Module:
        return ast.parse(self.text)

    @property
    def room(self) -> str:
        """The folder or file at the top of the package."""
        return self.name.partition(".")[0]

    @cached_property
    def _lines(self) -> tuple[int, int]:
        code: set[int] = set()
        comments = 0
        for token in tokenize.generate_tokens(io.StringIO(self.text).readline):
            comments += token.type == tokenize.COMMENT
            if token.type not in NO_CODE:
                code.update(range(token.start[0], token.end[0] + 1))
        for node in ast.walk(self.tree):
            value = node.value if isinstance(node, ast.Expr) else None
            if isinstance(value, ast.Constant) and isinstance(value.value, str):
                code.difference_update(range(node.lineno, (node.end_lineno or node.lineno) + 1))
        return len(code), comments

    @property
    def code(self) -> int:
        """Lines that hold code: docstrings, comments and blank lines do not count."""
        return self._lines[0]

    @property
    def comments(self) -> int:
        return self._lines[1]

    @cached_property
    def import_lines(self) -> int:
        found = [
            each for each in ast.walk(self.tree) if isinstance(each, ast.Import | ast.ImportFrom)
        ]
        return sum((each.end_lineno or each.lineno) - each.lineno + 1 for each in found)

    @property
    def classes(self) -> Iterator[ast.ClassDef]:
        return (each for each in ast.walk(self.tree) if isinstance(each, ast.ClassDef))


def read(package: Path = PACKAGE) -> dict[str, File]:
    """All files of the package, with the files that each of them imports."""
    files: dict[str, File] = {}
    for path in sorted(package.rglob("*.py")):
        parts = path.relative_to(package).with_suffix("").parts
        name = ".".join(parts[:-1] if parts[-1] == "__init__" else parts) or "__init__"
        files[name] = File(name, path.read_text(encoding="utf-8"), path.name == "__init__.py")
    for each in files.values():
        each.needs = set(_imports(each, files.keys(), package.name)) - {each.name}
    return files


def _imports(file: File, known: object, root: str) -> Iterator[str]:
    assert hasattr(known, "__contains__")
    for node in ast.walk(file.tree):
        names = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and not node.level:
            base = node.module or ""
            names = [f"{base}.{alias.name}" for alias in node.names]
            names = [name if name.removeprefix(f"{root}.") in known else base for name in names]
        for name in names:
            short = name.removeprefix(f"{root}.")
            if name == root:
                yield "__init__"
            elif name != short and short in known:
                yield short


def importers(files: dict[str, File]) -> dict[str, set[str]]:
    """The files that import each file."""
    found: dict[str, set[str]] = {name: set() for name in files}
    for each in files.values():
        for name in each.needs:
            found[name].add(each.name)
    return found


def corridors(files: dict[str, File]) -> list[str]:
    """Files with little code and one importer in their own package (rule 1 of the house)."""
    found = []
    for name, users in importers(files).items():
        home = name.rpartition(".")[0]
        if len(users) == 1 and not files[name].package and files[name].code < 60:
            (user,) = users
            if user.rpartition(".")[0] == home and files[user].code + files[name].code <= 300:
                found.append(f"{name} ({files[name].code} lines) belongs in {user}")
    return found


def components(graph: dict[str, set[str]]) -> list[list[str]]:
    """The groups of nodes that reach each other, with more than one node."""
    order: list[str] = []
    seen: set[str] = set()
    back: dict[str, set[str]] = {name: set() for name in graph}
    for name, targets in graph.items():
        for target in targets:
            back[target].add(name)

    def walk(start: str, edges: dict[str, set[str]], into: list[str]) -> None:
        stack = [(start, iter(sorted(edges[start])))]
        seen.add(start)
        while stack:
            node, rest = stack[-1]
            for other in rest:
                if other not in seen:
                    seen.add(other)
                    stack.append((other, iter(sorted(edges[other]))))
                    break
            else:
                into.append(node)
                stack.pop()

    for name in sorted(graph):
        if name not in seen:
            walk(name, graph, order)
    seen.clear()
    found = []
    for name in reversed(order):
        if name not in seen:
            group: list[str] = []
            walk(name, back, group)
            found.append(sorted(group))
    return [group for group in found if len(group) > 1]


def package_cycles(files: dict[str, File]) -> list[list[str]]:
    """Rooms that need each other. The package's own `__init__` shows names, and is none."""
    graph: dict[str, set[str]] = {each.room: set() for each in files.values()}
    for each in files.values():
        graph[each.room] |= {name.partition(".")[0] for name in each.needs} - {each.room}
    graph.pop("__init__", None)
    return components({name: needs - {"__init__"} for name, needs in graph.items()})


def callables(files: dict[str, File], rooms: tuple[str, ...] = PORTED) -> list[str]:
    """Parameters of constructors that are annotated as a callable: ``module.Class(parameter)``."""
    found = []
    for each in files.values():
        if each.room in rooms:
            aliases = {
                node.target.id if isinstance(node, ast.AnnAssign) else ast.unparse(node.targets[0])
                for node in each.tree.body
                if (isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name))
                or isinstance(node, ast.Assign)
                if node.value is not None and "Callable[" in ast.unparse(node.value)
            }
            for made in each.classes:
                found += [f"{each.name}.{made.name}({name})" for name in _taken(made, aliases)]
    return found


def _taken(made: ast.ClassDef, aliases: set[str]) -> Iterator[str]:
    fields = any("dataclass" in ast.unparse(each) for each in made.decorator_list)
    for node in made.body:
        if isinstance(node, ast.FunctionDef) and node.name == "__init__":
            for argument in (*node.args.args, *node.args.kwonlyargs):
                if argument.annotation and _is_callable(argument.annotation, aliases):
                    yield argument.arg
        if fields and isinstance(node, ast.AnnAssign) and _is_callable(node.annotation, aliases):
            yield ast.unparse(node.target)


def _is_callable(annotation: ast.expr, aliases: set[str]) -> bool:
    names = {each.id for each in ast.walk(annotation) if isinstance(each, ast.Name)}
    return bool(names & ({"Callable"} | aliases))


def bound_methods(files: dict[str, File], rooms: tuple[str, ...] = PORTED) -> list[str]:
    """Methods of its own that an object gives to a constructor: ``module:line: Class(self.x)``."""
    found = []
    for each in files.values():
        for giver in each.classes if each.room in rooms else ():
            methods = {
                node.name
                for node in giver.body
                if isinstance(node, ast.FunctionDef) and not node.decorator_list
            }
            for call in ast.walk(giver):
                if isinstance(call, ast.Call) and _makes(call):
                    found += [
                        f"{each.name}:{call.lineno}: {ast.unparse(call.func)}({ast.unparse(value)})"
                        for value in (*call.args, *(one.value for one in call.keywords))
                        if isinstance(value, ast.Attribute)
                        if ast.unparse(value) == f"self.{value.attr}" and value.attr in methods
                    ]
    return found


def _makes(call: ast.Call) -> bool:
    name = ast.unparse(call.func).rpartition(".")[2].lstrip("_")
    return name[:1].isupper() and not name.isupper()


def doubled(files: dict[str, File]) -> dict[str, list[str]]:
    """Public class names that are given to more than one class, with their files."""
    places: dict[str, list[str]] = {}
    for each in files.values():
        for node in each.tree.body:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                places.setdefault(node.name, []).append(each.name)
    return {name: found for name, found in sorted(places.items()) if len(found) > 1}


def figures(files: dict[str, File]) -> dict[str, float]:
    """Every measure that the source alone gives."""
    code = sum(each.code for each in files.values())
    users = Counter(len(found) for found in importers(files).values())
    return {
        "rooms": len({each.room for each in files.values()} - {"__init__", "__main__"}),
        "files": len(files),
        "lines of code": code,
        "longest file": max(each.code for each in files.values()),
        "files with one importer": users[1],
        "corridors": len(corridors(files)),
        "imports, % of code": round(
            100 * sum(each.import_lines for each in files.values()) / code, 1
        ),
        "comments, per 100 lines": round(
            100 * sum(each.comments for each in files.values()) / code, 1
        ),
        "class names given twice": len(doubled(files)),
        "cycles of files": len(components({name: each.needs for name, each in files.items()})),
        "cycles of packages": len(package_cycles(files)),
        "callables in constructors": len(callables(files)),
        "bound methods given to constructors": len(bound_methods(files)),
    }


# -- the way of a call, of a task --------------------------------------------------------------

WATCH = """
import sys, threading
import json, os
PACKAGE, OUT = sys.argv[1] + os.sep, sys.argv[2]
visited, on = set(), False
def watch(frame, event, _):
    if on and event == "call":
        code = frame.f_code
        if code.co_filename.startswith(PACKAGE) and code.co_name != "<module>":
            visited.add(code.co_filename[len(PACKAGE):])
def begin():
    global on
    threading.setprofile(watch); sys.setprofile(watch); on = True
def end():
    global on
    on = False; sys.setprofile(None); threading.setprofile(None)
    with open(OUT, "w") as file:
        json.dump(sorted(visited), file)
"""
SEND = """
from aztask import App
app = App("house")
@app.task
def add(a, b): return a + b
app.broker.declare("default")
add.delay(1, 2)
begin()
ways = []
for n in range(20):  # what happens once in so many milliseconds falls between two on any machine
    visited.clear()
    add.delay(n, 4)
    ways.append(set(visited))
visited = min(ways, key=len)
end()
os._exit(0)
"""
APP = """
from aztask import App
app = App("house")
@app.task
def add(a, b): return a + b
"""
WORK = """
import signal, subprocess
from aztask.operate.cli.main import main
def run(count):
    text = "from house_app import add; sent = [add.delay(n, 1) for n in range({})]; "
    text += "[each.get(timeout=60) for each in sent]"
    subprocess.run([sys.executable, "-c", text.format(count)], check=True)
def watched():  # from the first task's end to the end of three more: what starts does not count
    global on
    run(1)
    on = True
    run(3)
    on = False
    os.kill(os.getpid(), signal.SIGTERM)
sys.argv = ["aztask", "worker", "-A", "house_app:app", "-c", "2"]
begin()
on = False
threading.Thread(target=watched).start()
try:
    main()
finally:
    end()
    os._exit(0)
"""


def visited(script: str, broker: str = "", results: str = "") -> list[str]:
    """The package's own files in which the script called something between begin() and end()."""
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "house_app.py").write_text(APP)
        out = Path(folder, "visited.json")
        environment = {
            **os.environ,
            "PYTHONPATH": os.pathsep.join((folder, str(ROOT))),
            "AZTASK_BROKER": broker or f"local:///{folder}/queues.db",
            "AZTASK_RESULTS": results or f"local:///{folder}/queues.db",
        }
        subprocess.run(
            [sys.executable, "-c", WATCH + script, str(PACKAGE), str(out)],
            cwd=folder,
            env=environment,
            check=True,
            timeout=120,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
        )
        return list(json.loads(out.read_text()))


def ways() -> dict[str, list[str]]:
    """The files on the way of one ``.delay()``, and those of a warm supervisor for three tasks."""
    return {"one .delay(), local": visited(SEND), "the supervisor, three tasks": visited(WORK)}


@contextmanager
def services() -> Iterator[dict[str, tuple[str, str]]]:
    """Addresses of a broker and a result store on Azurite, and on the emulator."""
    sys.path.insert(0, str(ROOT / "tests" / "integration"))
    sys.path.insert(0, str(ROOT / "tests"))
    from azurite import running  # noqa: PLC0415  # only --brokers needs what tests need

    from aztask.queues.servicebus.admin import ADMIN_VARIABLE  # noqa: PLC0415
    from aztask.testing import emulator  # noqa: PLC0415

    with (
        tempfile.TemporaryDirectory() as folder,
        running(Path(folder)) as server,
        emulator() as bus,
    ):
        storage = server.connection_string
        os.environ[ADMIN_VARIABLE] = bus.admin_connection_string
        yield {"storagequeue": (storage, storage), "servicebus": (bus.connection_string, storage)}


def main() -> None:
    files = read()
    for name, value in figures(files).items():
        print(f"{name:40} {value:>8,}")
    for name, found in ways().items():
        print(f"{'files on the way: ' + name:40} {len(found):>8,}")
    if "--brokers" in sys.argv:
        with services() as addresses:
            for name, (broker, results) in addresses.items():
                found = visited(SEND, broker, results)
                print(f"{'files on the way: one .delay(), ' + name:40} {len(found):>8,}")
    for line in (*corridors(files), *callables(files), *bound_methods(files)):
        print(line)
    for name, places in doubled(files).items():
        print(f"class {name}: {', '.join(places)}")


if __name__ == "__main__":
    main()
