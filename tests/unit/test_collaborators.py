"""The rules of the house: who calls whom can be read from constructors, and time has one source.

Rules
1. A constructor gets collaborators with names, no functions. A queue of calls may hold calls.
2. Clocks, randomness and ids come through `aztask.support.clock` and `aztask.support.chance`.
   So a simulation can run all of this in one thread, and repeat it from one number.

The checkers read the source with `ast` and run nothing.
"""

import ast
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[2] / "aztask"

CALLABLES = {
    "worker.breaking._Job": "a call that waits for the thread that asks the store",
    "worker.upkeep.housekeeping.Chore": "a call that waits for the thread of the chores",
    "worker.overseer.OverseerLink": "the probes of the health port, which are functions there",
}
"""Constructors of `aztask.worker` that take a function, each with the reason."""

QUEUES = ("deque[", "dict[", "list[")
"""What an attribute may hold calls in."""

TIMED = ("worker", "lease", "workflows", "schedules", "limits", "uniqueness", "sending")
"""The packages that a simulation runs."""


@cache
def parsed(path: Path) -> ast.Module:
    """A module's tree."""
    return ast.parse(path.read_text(encoding="utf-8"))


def sources(*packages: str) -> Iterator[tuple[str, ast.Module]]:
    """(dotted name under the package, tree) of each module of these packages."""
    for package in packages:
        for path in sorted((PACKAGE / package).rglob("*.py")):
            name = ".".join(path.relative_to(PACKAGE).with_suffix("").parts)
            yield name, parsed(path)


TIMES = {
    "worker.lane.ThreadLane": "real threads wait for real time",
    "worker.pool.runner.SlotRunner": "a pool process is real",
    "worker.pool.attempt.RunReader": "a pool process is real; this is for its log",
    "worker.pool.eventloop.TimedSelector": "a pool process is real",
    "worker.pool.loopwatch.LoopWatch": "a pool process is real",
    "worker.pool.interrupt._clear_interrupt": "it only lets another thread go on",
    "worker.pool.forking.ForkServerHandle": "a fork server is real",
    "worker.pool.watcher.WatchingProcess": "the name of a folder must not be guessed",
    "worker.pool.watcher.Watched": "a script beside the worker, which is real",
    "worker.pool.watcher._look_for_parent": "the same script",
    "worker.overseer.OverseerLink": "it talks to another process, which is real",
    "worker.overseer.OverseenSupervisor": "a supervisor's process is real",
    "worker.overseer.Overseer": "it starts and watches processes, which are real",
    "worker.upkeep.heartbeat.Heartbeat": "a hook gets a time of `time.monotonic`, as documented",
}
"""Where the time of the system itself is read, each with the reason."""


# -- constructors ------------------------------------------------------------------------------


def is_callable(annotation: ast.expr | None) -> bool:
    """Whether this annotation names a function, however deep."""
    if annotation is None:
        return False
    names = (getattr(each, "id", getattr(each, "attr", "")) for each in ast.walk(annotation))
    return "Callable" in names or (
        isinstance(annotation, ast.Constant) and "Callable" in str(annotation.value)
    )


def aliases(tree: ast.Module) -> set[str]:
    """The names of this module that stand for a function."""
    found = set()
    for node in tree.body:
        if isinstance(node, ast.Assign) and is_callable(node.value):
            found |= {each.id for each in node.targets if isinstance(each, ast.Name)}
        elif isinstance(node, ast.AnnAssign) and is_callable(node.value):
            found |= {node.target.id} if isinstance(node.target, ast.Name) else set()
    return found


def takes_callables(tree: ast.Module) -> set[str]:
    """The classes whose constructor, fields or attributes are annotated as functions."""
    known = aliases(tree)

    def is_function(annotation: ast.expr | None) -> bool:
        named = annotation is not None and any(
            isinstance(each, ast.Name) and each.id in known for each in ast.walk(annotation)
        )
        return named or is_callable(annotation)

    found = set()
    for cls in ast.walk(tree):
        if not isinstance(cls, ast.ClassDef):
            continue
        for node in cls.body:
            if isinstance(node, ast.AnnAssign) and is_function(node.annotation):
                found.add(cls.name)
            if isinstance(node, ast.FunctionDef) and node.name == "__init__":
                arguments = node.args
                every = [*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs]
                inside = [
                    each.annotation for each in ast.walk(node) if isinstance(each, ast.AnnAssign)
                ]
                hooks = [each for each in inside if not ast.unparse(each).startswith(QUEUES)]
                if any(map(is_function, [*(each.annotation for each in every), *hooks])):
                    found.add(cls.name)
    return found


def constructors(trees: list[ast.Module]) -> set[str]:
    """The names of the classes of these modules."""
    return {
        node.name for tree in trees for node in ast.walk(tree) if isinstance(node, ast.ClassDef)
    }


def gives_functions(tree: ast.Module, classes: set[str], methods: set[str]) -> list[str]:
    """Calls of these classes, and attributes of other objects, that get a method or a lambda."""
    found = []
    for node in ast.walk(tree):
        given: list[ast.expr] = []
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
            if node.func.id in classes:
                given = [*node.args, *(each.value for each in node.keywords)]
        elif isinstance(node, ast.Assign) and any(map(_is_foreign, node.targets)):
            given = [node.value]
        for each in given:
            # The hooks of an app are objects.
            bound = isinstance(each, ast.Attribute) and each.attr in methods
            bound = bound and not ast.unparse(each).startswith("app.hooks.")
            if isinstance(each, ast.Lambda) or bound:
                found.append(ast.unparse(node))
    return found


def _is_foreign(target: ast.expr) -> bool:
    """Whether this is an attribute of an object that the code does not make itself of."""
    return isinstance(target, ast.Attribute) and ast.unparse(target.value) not in ("self", "cls")


def methods_of(trees: list[ast.Module]) -> set[str]:
    """The names of all methods, without those of properties and of fields."""
    methods, values = set(), set()
    for tree in trees:
        for cls in ast.walk(tree):
            for node in cls.body if isinstance(cls, ast.ClassDef) else ():
                if isinstance(node, ast.FunctionDef):
                    kinds = {ast.unparse(each) for each in node.decorator_list}
                    (values if "property" in kinds else methods).add(node.name)
                elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
                    values.add(node.target.id)
            if isinstance(cls, ast.ClassDef):
                values |= {
                    each.attr
                    for each in ast.walk(cls)
                    if isinstance(each, ast.Attribute) and isinstance(each.ctx, ast.Store)
                }
    return methods - values


def test_no_constructor_of_the_worker_takes_a_function():
    found = {f"{name}.{cls}" for name, tree in sources("worker") for cls in takes_callables(tree)}
    assert found == CALLABLES.keys()


def test_no_constructor_of_the_worker_gets_a_bound_method():
    trees = dict(sources("worker"))
    every = list(trees.values())
    classes = constructors(every) - {name.rpartition(".")[2] for name in CALLABLES}
    methods = methods_of(every)
    assert {"claim", "finish", "put_aside"} <= methods
    found = {name: gives_functions(tree, classes, methods) for name, tree in trees.items()}
    assert {name: calls for name, calls in found.items() if calls} == {}


@pytest.mark.parametrize(
    "source",
    [
        "class A:\n    def __init__(self, done: Callable[[int], None]): ...",
        "class A:\n    def __init__(self, *, done: 'Callable[[], None] | None' = None): ...",
        "class A:\n    def __init__(self):\n        self.done: Callable[[], None] = print",
        "Batch: TypeAlias = Callable[[], None]\nclass A:\n    def __init__(self, done: Batch): ...",
        "@dataclass\nclass A:\n    do: collections.abc.Callable[[], object]",
    ],
)
def test_the_checker_sees_functions_in_constructors(source):
    assert takes_callables(ast.parse(source)) == {"A"}


@pytest.mark.parametrize(
    "source",
    ["A(self.done)", "A(x, finish=self._lane.submit)", "A(lambda: 1)", "gating.tell = self.tell"],
)
def test_the_checker_sees_functions_that_are_handed_over(source):
    methods = {"done", "submit", "tell"}
    assert gives_functions(ast.parse(source), {"A"}, methods)
    assert not gives_functions(ast.parse("A(self._lane)\nself.tell = x"), {"A"}, methods)


# -- time, randomness and ids --------------------------------------------------------------------

SOURCES = {
    "time": {"time", "monotonic", "sleep", "perf_counter", "time_ns", "monotonic_ns"},
    "random": None,
    "uuid": None,
    "secrets": None,
    "os": {"urandom", "getrandom"},
    "datetime": {"now", "utcnow", "today"},
    "aztask.support.clock": {"boot_seconds"},
}
"""What tells time or draws lots: of each module all names, or these."""


def system_sources(tree: ast.Module) -> dict[str, set[str]]:
    """What reads the system's time or draws from it: {class or function: what it uses}."""
    names, modules = imported_sources(tree)
    found: dict[str, set[str]] = {}
    for top in tree.body:
        if isinstance(top, ast.Import | ast.ImportFrom):
            continue
        for node in ast.walk(top):
            if used := source_of(node, names, modules):
                found.setdefault(getattr(top, "name", "the module"), set()).add(used)
    return found


def imported_sources(tree: ast.Module) -> tuple[dict[str, str], dict[str, str]]:
    """What the names of a module stand for: functions that are sources, and modules."""
    names, modules = {}, {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            modules |= {each.asname or each.name: each.name for each in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module in SOURCES:
            known = SOURCES[node.module]
            for each in node.names:
                if known is None or each.name in known:
                    names[each.asname or each.name] = f"{node.module}.{each.name}"
    return names, modules


def source_of(node: ast.AST, names: dict[str, str], modules: dict[str, str]) -> str:
    """The source that this name or attribute stands for; else ""."""
    if isinstance(node, ast.Name):
        return names.get(node.id, "")
    if isinstance(node, ast.Attribute):
        of = ast.unparse(node.value)
        module = modules.get(of, "")
        known = SOURCES.get(module, set())
        if known is None or node.attr in known:
            return f"{module}.{node.attr}"
        if node.attr in ("now", "utcnow", "today") and "date" in of:
            return f"datetime.{node.attr}"
    return ""


def test_time_randomness_and_ids_come_from_one_place():
    found = {
        f"{name}.{where}": used
        for name, tree in sources(*TIMED)
        for where, used in system_sources(tree).items()
    }
    assert found.keys() == TIMES.keys(), found


@pytest.mark.parametrize(
    "source",
    [
        "import time\ndef f():\n    return time.monotonic()",
        "import time as clock\nclass A:\n    def f(self, sleep=clock.sleep): ...",
        "from time import time\nnow = time()",
        "import random\nx = random.Random()",
        "from uuid import uuid4 as new\ndef f():\n    new()",
        "import secrets\nsecrets.token_hex()",
        "import os\nos.urandom(16)",
        "from datetime import datetime\ndatetime.now(UTC)",
        "from aztask.support.clock import boot_seconds\nboot_seconds()",
    ],
)
def test_the_checker_sees_every_source(source):
    assert system_sources(ast.parse(source))


def test_the_checker_lets_other_uses_pass():
    source = "import time, os\ntime.gmtime(0)\nos.getpid()\nself.now()\nclock.wall()"
    assert system_sources(ast.parse(source)) == {}
