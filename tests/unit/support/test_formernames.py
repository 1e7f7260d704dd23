"""Former names of modules import the module itself."""

import ast
import pickle
import subprocess
import sys
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from pkgutil import resolve_name

import pytest
from celery.app.backends import by_name
from kombu import Connection

from aztask.support.formernames import FORMER, present_name

PACKAGE = Path(__file__).parents[3] / "aztask"

DOCUMENTED = {
    "aztask.adaptive.stores": ("open_lease_store",),
    "aztask.canvas.graphs": ("Graph",),
    "aztask.cli.main": ("main",),
    "aztask.deadletters.view": ("DeadLetters", "Selection"),
    "aztask.events.event": ("Event",),
    "aztask.events.sink": ("Event", "FileEventSink", "read_events"),
    "aztask.lease.bounds": ("Bounds",),
    "aztask.transport": ("Transport", "register"),
    "aztask.transport.names": ("original_name",),
}
"""What the documentation of earlier releases imported from them."""

EXTRAS = {"textual", "libcst", "pyspark", "watchfiles"}


def former_modules():
    """Every module that has a former name, by that name: those of the packages too."""
    names = set(FORMER)
    for former, now in FORMER.items():
        folder = PACKAGE.parent / now.replace(".", "/")
        for path in folder.rglob("*.py"):
            parts = path.relative_to(folder).with_suffix("").parts
            if "project" not in parts:
                names.add(".".join((former, *(each for each in parts if each != "__init__"))))
    return sorted(names)


@pytest.mark.parametrize("name", former_modules())
def test_a_former_name_is_the_module_itself(name):
    try:
        module = import_module(name)
    except ModuleNotFoundError as error:
        assert error.name.partition(".")[0] in EXTRAS
        pytest.skip(f"{error.name} is missing")
    now = present_name(name)
    assert module is import_module(now)
    assert module.__name__ == now
    assert module.__spec__.name == now


@pytest.mark.parametrize(
    ("name", "now"),
    [
        ("aztask.results.tables.store", "aztask.stores.records.tables.store"),
        ("aztask.canvas.place", "aztask.workflows.place"),
        ("aztask.canvas.limits", "aztask.limits.declaration"),
        ("aztask.payloads.place", "aztask.address.urls"),
        ("aztask.cli.spark.dlq", "aztask.spark.cli.dlq"),
        ("aztask.result", None),
        ("aztask.stores.rows", None),
        ("aztask", None),
        ("other.results", None),
    ],
)
def test_the_longest_former_name_counts(name, now):
    assert present_name(name) == now


@pytest.mark.parametrize("name", sorted(FORMER))
def test_no_module_has_a_former_name(name):
    path = PACKAGE.parent / name.replace(".", "/")
    assert not (path / "__init__.py").exists() and not path.with_suffix(".py").exists()


@pytest.mark.parametrize("name", sorted(DOCUMENTED))
def test_what_documentation_imported_is_still_there(name):
    module, now = import_module(name), import_module(present_name(name))
    for each in DOCUMENTED[name]:
        assert getattr(module, each) is getattr(now, each)


def printed(code, *arguments):
    """What a program of its own prints, as a value of Python."""
    command = [sys.executable, *(arguments or ("-W", "error", "-c", code))]
    ended = subprocess.run(command, capture_output=True, text=True, check=True)
    return ast.literal_eval(ended.stdout or "None")


def test_a_program_may_import_only_the_former_name():
    code = (
        "import sys\n"
        "from aztask.deadletters.view import DeadLetters as former\n"
        "from aztask.operate.deadletters.view import DeadLetters\n"
        "import aztask.deadletters\n"
        "print([former is DeadLetters, aztask.deadletters.DeadLetters is former])"
    )
    assert printed(code) == [True, True]


@pytest.mark.parametrize("first", [0, 1])
def test_both_names_in_one_program(first):
    names = ["import aztask.lease.held", "import aztask.queues.lease.held"]
    code = (
        f"{names[first]}\n{names[1 - first]}\n"
        "import aztask\n"
        "former, now = aztask.lease.held, aztask.queues.lease.held\n"
        "print([former is now, former.HeldLease is aztask.HeldLease, now.__spec__.name])"
    )
    assert printed(code) == [True, True, "aztask.queues.lease.held"]


def test_celery_and_kombu_find_the_classes_by_their_former_names():
    """As ``BROKER_TRANSPORT`` and ``result_backend`` of a project name them."""
    from aztask.celery.backend import Backend  # noqa: PLC0415
    from aztask.celery.transport import Transport  # noqa: PLC0415

    for name in ("aztask.transport:Transport", "aztask.transport.Transport"):
        assert Connection(transport=name).get_transport_cls() is Transport
    assert by_name("aztask.backend:Backend") is Backend


def test_a_pickle_of_an_earlier_release_is_read():
    from aztask.queues.lease.bounds import Bounds  # noqa: PLC0415

    stored = pickle.dumps(Bounds(30, 300, min_samples=5), protocol=0)
    assert b"aztask.queues.lease.bounds" in stored
    former = stored.replace(b"aztask.queues.lease.bounds", b"aztask.lease.bounds")
    assert pickle.loads(former) == Bounds(30, 300, min_samples=5)


def test_a_program_may_run_a_module_by_its_former_name():
    assert printed("", "-W", "error", "-m", "aztask.canvas.place") is None
    assert printed("", "-W", "error", "-m", "aztask.cli.main") is None
    command = [sys.executable, "-m", "aztask.canvas.nothing"]
    ended = subprocess.run(command, capture_output=True, text=True, check=False)
    assert "No module named aztask.canvas.nothing" in ended.stderr


def test_its_spec_says_where_the_module_is():
    spec, now = find_spec("aztask.results"), find_spec("aztask.stores.records")
    assert spec.origin == now.origin
    assert [*spec.submodule_search_locations] == [*now.submodule_search_locations]


def test_the_command_that_an_earlier_installation_wrote_still_runs():
    """Its script imports ``main`` from the former name until the package is installed anew."""
    from aztask.operate.cli.main import main  # noqa: PLC0415

    assert resolve_name("aztask.cli.main:main") is main


@pytest.mark.parametrize(
    "name",
    ["aztask.deadletters.nothing", "aztask.canvas.nothing", "aztask.connections.nothing"],
)
def test_other_modules_are_not_found_by_it(name):
    with pytest.raises(ModuleNotFoundError, match=name.replace(".", r"\.")):
        import_module(name)
