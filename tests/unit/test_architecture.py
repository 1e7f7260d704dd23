"""The layout holds: imports point one way, without cycles, and files and functions stay readable.

The checker reads the source with `ast` and runs nothing. The last part of this file tests the
checker itself on small trees that each break one rule.
"""

import ast
import io
import re
import tokenize
from dataclasses import dataclass, field
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[2] / "aztask"

# Each package, and each module beside them, belongs to one layer. It imports from its own layer or
# from earlier ones. A package inside another one may be a part with a layer of its own; its name
# has a dot. This lists exactly what exists; docs/architecture.md draws it.
LAYERS = {
    "values": "errors version support address message settlement breaker typed",
    "engines": "queues.engine azure retry",
    "brokers": "queues",
    "leases": "queues.lease",
    "stores": "config stores",
    "advice": "stores.events leaseadvice",
    "tasks": "session steps context result hooks limits.declaration workflows schedules uniqueness"
    " taskoptions task handler celery sending",
    "app": "app celery.embedded __init__",
    "care": "limits",
    "worker": "worker",
    "operate": "operate",
    "telemetry": "telemetry",
    "edges": "agents celery.backend celery.migration dashboard django emulator operate.cli"
    " operate.top spark spark.cli testing __main__",
}
LEVEL = {name: level for level, names in enumerate(LAYERS.values()) for name in names.split()}

# Who may import a library that only some parts need. A part inside of another one is named itself.
LIBRARIES = {
    "azure": (
        *("queues", "stores.records", "stores.tables", "stores.events", "stores.payloads.blob"),
        *("azure", "spark"),
    ),
    "kombu": ("celery.transport", "message.codec", "message.jsonencoding", "sending.publisher"),
    "click": ("operate.cli", "spark.cli"),
    "pyspark": ("spark",),
    "py4j": ("spark",),
    "pyarrow": ("spark",),
    "pandas": ("spark",),
    "deltalake": ("spark.tables",),
    "mcp": ("agents",),
    "anyio": ("agents",),
    "msal": ("dashboard",),
    "jwt": ("dashboard",),
    "requests": ("dashboard",),
    "jinja2": ("spark.report", "dashboard"),
    "markupsafe": ("dashboard",),
    "starlette": ("dashboard",),
    "uvicorn": ("agents", "dashboard"),
    "watchfiles": ("operate.cli",),
    "opentelemetry": ("telemetry.otel",),
    "prometheus_client": ("telemetry.prometheus",),
    "textual": ("operate.top",),
    "rich": ("operate.top",),
    "libcst": ("celery.migration",),
    "celery": ("celery.backend", "operate.celerybeat"),
    "cryptography": ("message.encryption", "emulator.emulator"),
    "django": ("django",),
    "django_tasks": ("django",),
    "asgiref": ("django",),
}
# The emulator stands in for a service: it shares the engine with us and none of our own logic.
EMULATOR_MAY_IMPORT = ("emulator", "queues.engine", "errors", "support", "version")

COMMANDS = ("operate.cli", "spark.cli")

# What a layer offers from above it (`aztask.support.late`), and nothing else.
LATE = {("app", "aztask.testing.inline"), ("celery", "aztask.operate.celerybeat")}

FILE_LINES = 450
"""Lines of code: docstrings, comments and blank lines do not count, so that none is left out."""

FUNCTION_LINES = 60
NO_CODE = {
    tokenize.COMMENT,
    tokenize.NL,
    tokenize.NEWLINE,
    tokenize.INDENT,
    tokenize.DEDENT,
    tokenize.ENDMARKER,
}


@dataclass
class Module:
    """One source file: its dotted name, its text, and what it imports, with line numbers."""

    name: str
    path: Path
    tree: ast.Module
    imports: list[tuple[str, int]] = field(default_factory=list)
    local_imports: list[tuple[str, int]] = field(default_factory=list)

    @property
    def part(self):
        """What has its layer; see `part_of`."""
        return part_of(self.name)


def part_of(name):
    """The part that a module belongs to: the innermost package that is in a layer by its own name,
    or the name directly under the root package.
    """
    parts = name.split(".")[1:]
    names = [".".join(parts[:count]) for count in range(len(parts), 0, -1)]
    return next((each for each in names if each in LEVEL), parts[0] if parts else "__init__")


def read(package):
    """All modules of a package, by dotted name, with their imports resolved to modules."""
    modules = {}
    for path in sorted(package.rglob("*.py")):
        parts = path.relative_to(package.parent).with_suffix("").parts
        name = ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
        text = path.read_text(encoding="utf-8")
        modules[name] = Module(name, path, ast.parse(text))
    for module in modules.values():
        _collect(module, module.tree, modules.keys(), local=False)
    return modules


def _collect(module, node, known, local):
    inside = local or isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)
    for name in _imported(module, node, known):
        module.imports.append((name, node.lineno))
        if local:
            module.local_imports.append((name, node.lineno))
    for child in ast.iter_child_nodes(node):
        _collect(module, child, known, inside)


def _imported(module, node, known):
    """The dotted names that one statement imports: submodules where they are, else the module."""
    if isinstance(node, ast.Import):
        return [alias.name for alias in node.names]
    if isinstance(node, ast.ImportFrom):
        base = node.module or ""
        if node.level:
            parts = module.name.split(".")
            keep = len(parts) - node.level + (module.path.name == "__init__.py")
            base = ".".join([*parts[:keep], *([base] if base else [])])
        names = [f"{base}.{alias.name}" for alias in node.names]
        return [name if name in known else base for name in names]
    if isinstance(node, ast.Call) and ast.unparse(node.func).endswith("import_module"):
        target = node.args[0] if node.args else None
        if isinstance(target, ast.Constant) and str(target.value) in known:
            return [str(target.value)]
    return []


def problems(package):
    """Every broken rule of the package as a line: file, line number, what is wrong."""
    modules = read(package)
    found = []
    for module in modules.values():
        checks = (check_layers, check_libraries, check_local_imports, check_late, check_size)
        for check in checks:
            found += [f"{module.name}:{line}: {text}" for line, text in check(module, package.name)]
    return found + check_cycles(modules)


def check_layers(module, root):
    """Imports point from later layers to earlier ones, and every module has a layer."""
    if module.part not in LEVEL:
        yield 1, f"{module.part} is in no layer: put it into LAYERS, where it belongs"
        return
    for name, line in module.imports:
        parts = name.split(".")
        if parts[0] != root:
            continue
        target = part_of(name)
        if LEVEL.get(target, -1) > LEVEL[module.part]:
            yield line, f"imports {name}, which is in a later layer"
        if parts[1:2] == ["spark"] and not f"{module.name}.".startswith(f"{root}.spark."):
            yield line, f"imports {name}: only spark/ may"
        if module.part == "emulator" and target not in EMULATOR_MAY_IMPORT:
            yield line, f"imports {name}: the emulator stands on the engine alone"


def check_libraries(module, root):
    """A service's SDK, kombu, click and pyspark are imported only where they belong."""
    for name, line in module.imports:
        allowed = LIBRARIES.get(name.partition(".")[0])
        own = (each for each in allowed or () if f"{each}.".startswith(f"{module.part}."))
        places = tuple(f"{root}.{each}." for each in own)
        if allowed is not None and not f"{module.name}.".startswith(places):
            yield line, f"imports {name}: only {', '.join(allowed)} may"


def check_local_imports(module, root):
    """No import hides in a function, but for the commands, which are loaded when they are run, and
    the plugin, which pytest loads in every run.
    """
    if module.part not in COMMANDS and not module.name.endswith(".testing.plugin"):
        for name, line in module.local_imports:
            yield line, f"imports {name} inside a function"


def check_late(module, root):
    """A name of a later layer is imported late only where that is agreed, and by its full name."""
    for node in ast.walk(module.tree):
        if isinstance(node, ast.Call) and ast.unparse(node.func) == "late":
            name = node.args[0].value if isinstance(node.args[0], ast.Constant) else "a variable"
            if (module.part, name) not in LATE:
                yield node.lineno, f"imports {name} late: that is not agreed"


def check_size(module, root):
    """A file holds one noun, a function fits a screen, and a file says what it is for."""
    if (lines := code_lines(module)) >= FILE_LINES:
        yield 1, f"has {lines} lines of code; {FILE_LINES} are too many"
    if module.tree.body and not ast.get_docstring(module.tree):
        yield 1, "has no docstring"
    for node in ast.walk(module.tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            lines = (node.end_lineno or node.lineno) - node.lineno + 1
            if lines > FUNCTION_LINES:
                yield node.lineno, f"{node.name} has {lines} lines; {FUNCTION_LINES} are enough"


def code_lines(module):
    """How many lines of a module hold code."""
    text = module.path.read_text()
    lines = set()
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type not in NO_CODE:
            lines.update(range(token.start[0], token.end[0] + 1))
    for node in ast.walk(module.tree):
        value = node.value if isinstance(node, ast.Expr) else None
        if isinstance(value, ast.Constant) and isinstance(value.value, str):
            lines.difference_update(range(node.lineno, (node.end_lineno or node.lineno) + 1))
    return len(lines)


def check_cycles(modules):
    """No module needs itself, by whatever way (imports for type checking included)."""
    graph = {
        module.name: {name for name, _ in module.imports if name in modules}
        for module in modules.values()
    }
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        return [f"import cycle: {' -> '.join(reversed(error.args[1]))}"]
    return []


def test_the_package_keeps_its_rules():
    assert "\n".join(problems(PACKAGE)) == ""


def comparisons(source):
    """What a module compares, and how: operators as they are written, and calls that compare."""
    found = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Compare):
            found.append(ast.unparse(node))
        elif isinstance(node, ast.Call) and ast.unparse(node.func).endswith(COMPARING):
            found.append(ast.unparse(node.func))
    return found


COMPARING = ("compare_digest", "operator.eq", "with", "match")


def test_signatures_are_compared_in_constant_time_alone():
    """An ordinary comparison takes the longer the more of a forged signature is right."""
    tree = ast.parse((PACKAGE / "message" / "signatures.py").read_text())
    signing = [each for each in tree.body if getattr(each, "name", "") in ("Signer", "check_key")]
    found = comparisons("\n".join(ast.unparse(each) for each in signing))
    assert sorted(found) == ["hmac.compare_digest", "len(key) < KEY_BYTES"]


@pytest.mark.parametrize(
    "source",
    ["a == b", "a != b", "a in b", "a.startswith(b)", "any(x == a for x in b)", "eq = a is b"],
)
def test_the_checker_sees_every_comparison(source):
    assert comparisons(source)


def test_the_layers_list_exactly_what_exists():
    assert {module.part for module in read(PACKAGE).values()} == LEVEL.keys()


def test_the_checker_sees_the_package():
    modules = read(PACKAGE)
    assert {"aztask", "aztask.errors", "aztask.queues.base"} <= modules.keys()
    assert "aztask.errors" in dict(modules["aztask.address.urls"].imports)


@pytest.mark.parametrize(
    ("files", "words"),
    [
        ({"errors.py": "import aztask.app", "app.py": ""}, "errors:2: imports aztask.app, .*later"),
        ({"errors.py": "from aztask import app", "app.py": ""}, "later layer"),
        ({"errors.py": "from . import app", "app.py": ""}, "later layer"),
        ({"queues/base.py": "from ..app import App", "app.py": ""}, "later layer"),
        ({"queues/__init__.py": "from ..app import App", "app.py": ""}, "later layer"),
        ({"queues/engine/a.py": "import aztask", "__init__.py": ""}, "later layer"),
        (
            {"queues/engine/a.py": "from aztask.queues import base", "queues/base.py": ""},
            "imports aztask.queues.base, which is in a later layer",
        ),
        ({"celery/other.py": "import aztask.app", "app.py": ""}, "later layer"),
        ({"novelty.py": ""}, "novelty is in no layer"),
        (
            {"app.py": "import azure.storage.queue"},
            "only queues, stores.records, stores.tables, .* may",
        ),
        ({"worker/a.py": "from kombu import Producer"}, "only celery.transport, message.codec"),
        ({"app.py": "import click.testing"}, "only operate.cli, spark.cli may"),
        ({"operate/cli/main.py": "from pyspark.sql import Row"}, "only spark may"),
        ({"operate/a.py": "import click"}, "only operate.cli, spark.cli may"),
        ({"app.py": "def f():\n    import json"}, "app:3: imports json inside a function"),
        ({"app.py": "class A:\n    async def f(self):\n        import json"}, "inside a function"),
        (
            {"app.py": "import importlib\ndef f():\n    importlib.import_module('aztask.task')"}
            | {"task.py": ""},
            "imports aztask.task inside a function",
        ),
        ({"task.py": "import aztask.app", "app.py": "import aztask.task"}, "cycle: .*task"),
        (
            {
                "task.py": "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n"
                "    from aztask.app import App",
                "app.py": "from aztask.task import Task",
            },
            "import cycle",
        ),
        ({"worker/a.py": "from aztask.spark import x", "spark/__init__.py": ""}, "only spark/"),
        ({"operate/cli/main.py": "import aztask.spark", "spark/__init__.py": ""}, "only spark/"),
        ({"spark/cli/a.py": "import pyarrow"}, "only spark may"),
        ({"worker/a.py": "import pandas"}, "only spark may"),
        (
            {"emulator/a.py": "import aztask.message.codec", "message/codec.py": ""},
            "stands on the engine",
        ),
        ({"app.py": "def f():\n    late('aztask.worker.x', 'y')"}, "aztask.worker.x late: that"),
        ({"app.py": "def f(name):\n    late(name, 'y')"}, "imports a variable late"),
        ({"app.py": "x = 1\n" * 450}, "has 450 lines of code"),
        ({"app.py": "def f():\n" + "    x = 1\n" * 60}, "f has 61 lines"),
    ],
    ids=range(28),
)
def test_the_checker_finds(tmp_path, files, words):
    make_tree(tmp_path, files)
    found = problems(tmp_path / "aztask")
    assert len(found) >= 1
    assert any(re.search(words, line) for line in found), found


def test_the_checker_finds_a_missing_docstring(tmp_path):
    make_tree(tmp_path, {"app.py": "x = 1"}, docstring="")
    assert problems(tmp_path / "aztask") == ["aztask.app:1: has no docstring"]


def test_the_checker_lets_a_good_tree_pass(tmp_path):
    files = {
        "__init__.py": "from aztask.app import App",
        "errors.py": "",
        "queues/servicebus.py": "import azure.servicebus\nfrom ..errors import AztaskError",
        "message/codec.py": "from kombu import serialization",
        "app.py": "from aztask import errors\nfrom aztask.queues import servicebus",
        "spark/cli/__init__.py": "import click\n",
        "spark/cli/submit.py": "import click\ndef f():\n    from aztask.spark import submit",
        "spark/__init__.py": "import pyspark",
    }
    make_tree(tmp_path, files)
    assert problems(tmp_path / "aztask") == []


def make_tree(folder, files, docstring='"""What it is for."""'):
    for name, text in files.items():
        path = folder / "aztask" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"{docstring}\n{text}\n" if docstring else text)
