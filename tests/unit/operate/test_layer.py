"""Commands and ``aztask top`` parse, confirm and draw: `aztask.operate` asks and does."""

import ast
from pathlib import Path

import pytest

import aztask

PACKAGE = Path(aztask.__file__).parent
FOLDERS = ("operate/cli", "operate/top", "spark/cli")

ALLOWED = (
    *("aztask.operate", "aztask.support"),
    *("aztask.config", "aztask.errors", "aztask.version"),
    "aztask.app",  # the object that a command hands on
)
MORE = {
    # reads source code of others, no queue and no store
    "operate.cli.migrate": ("aztask.celery.migration",),
    "spark.cli": ("aztask.spark",),  # its commands ask Spark
    # what Spark found out is about lease advice, and --publish writes that
    "spark.cli.recommend": ("aztask.leaseadvice.document", "aztask.queues.lease.bounds"),
    # finds the app of a command
    "operate.cli.target": ("aztask.app.loading", "aztask.address.urls"),
    "operate.cli.workflow": ("aztask.workflows.graphs",),  # draws trees of text
}
"""What one module or package may import besides, and why."""

NOT_ABOVE_OPERATE = {
    "operate.cli.demo": "it is a program that uses aztask as any other: it sends and reads results",
    "operate.cli.demo_work": "the demo's tasks",
    "operate.cli.emulator": "it starts a service, and knows no app",
    "operate.cli.exporter": "it runs a part of a worker",
    "operate.cli.init": "it writes files",
    "operate.cli.jobs": "it runs until a signal stops it, as a worker does",
    "operate.cli.reload": "it restarts a worker",
    "operate.cli.scheduler": "it runs a part of a worker",
    "operate.cli.send": "it is `.delay()` on a command line",
    "operate.cli.watch": "it runs until a signal stops it, as a worker does",
    "operate.cli.worker": "it runs a worker",
}


def modules():
    """The modules of commands and top, by their names without the package's."""
    for path in sorted(path for folder in FOLDERS for path in (PACKAGE / folder).rglob("*.py")):
        if "project" not in path.parts:
            parts = path.relative_to(PACKAGE).with_suffix("").parts
            yield ".".join(part for part in parts if part != "__init__"), path


def imported(source):
    """The modules of aztask that a source imports."""
    for node in ast.walk(ast.parse(source)):
        names = []
        if isinstance(node, ast.ImportFrom):
            names = [node.module or ""]
            if node.module == "aztask":
                names = [f"aztask.{each.name}" for each in node.names]
        elif isinstance(node, ast.Import):
            names = [each.name for each in node.names]
        yield from (name for name in names if name.split(".")[0] == "aztask")


def under(name, places):
    return any(f"{name}.".startswith(f"{place}.") for place in places)


def refused(name, source):
    """What the module may not import."""
    more = [each for place, each in MORE.items() if under(name, [place])]
    allowed = (*ALLOWED, *(each for some in more for each in some))
    return [each for each in imported(source) if not under(each, allowed)]


@pytest.mark.parametrize(("name", "path"), list(modules()), ids=str)
def test_a_command_asks_the_operations_layer(name, path):
    found = refused(name, path.read_text())
    assert bool(found) <= (name in NOT_ABOVE_OPERATE), (name, found)


def test_every_exception_exists():
    names = {name for name, _ in modules()}
    assert names >= NOT_ABOVE_OPERATE.keys()
    assert all(any(under(name, [place]) for name in names) for place in MORE)


@pytest.mark.parametrize(
    ("name", "source", "found"),
    [
        ("operate.cli.dlq", "from aztask.stores.rows import Row", ["aztask.stores.rows"]),
        ("operate.cli.dlq", "def f():\n    import aztask.queues.base", ["aztask.queues.base"]),
        ("operate.cli.dlq", "from aztask import limits", ["aztask.limits"]),
        ("operate.cli.dlq", "from aztask.operate.deadletters import Selection\nimport click", []),
        ("spark.cli.dlq", "from aztask.spark import dead_letters", []),
        ("operate.cli.dlq", "from aztask.spark import dead_letters", ["aztask.spark"]),
        ("operate.cli.dlq", "from aztask.apparatus import x", ["aztask.apparatus"]),
    ],
)
def test_the_checker_sees_what_is_imported(name, source, found):
    assert refused(name, source) == found
