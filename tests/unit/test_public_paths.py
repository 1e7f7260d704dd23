"""What users import stays importable: every dotted path that an earlier release told them.

`publicpaths.py` collected the paths from the pages, the examples, the entry points and Kombu's
aliases of revision 07ed1de.
"""

import pkgutil

import publicpaths
import pytest
from kombu.transport import TRANSPORT_ALIASES

import aztask_kombu
from aztask.support.formernames import present_name

PATHS = publicpaths.LIST.read_text().split()


@pytest.mark.parametrize("path", PATHS)
def test_it_can_be_imported(path):
    assert pkgutil.resolve_name(path) is not None


def test_the_list_holds_what_users_import():
    assert {
        "aztask.App",
        "aztask.backend.Backend",
        "aztask.transport.Transport",
        "aztask.transport.register",
        "aztask.testing.plugin",
        "aztask.cli.main.main",
        "aztask.config.parse_broker",
    } <= set(PATHS)
    assert len(PATHS) > 150


def test_the_paths_of_this_tree_can_be_imported_too():
    """What the pages name today: the same list as of an earlier revision, read from here."""
    now = {present_name(path) or path for path in PATHS}
    modules = [path for path in publicpaths.collected(publicpaths.ROOT) if path in now]
    assert len(modules) > 0.9 * len(PATHS)


@pytest.mark.parametrize("alias", aztask_kombu.ALIASES)
def test_kombus_alias_names_a_class(alias):
    assert pkgutil.resolve_name(TRANSPORT_ALIASES[alias]).__name__ == "Transport"


def test_an_app_of_its_own_module():
    """`from aztask.app import App` is how many programs and the type checker name it."""
    assert pkgutil.resolve_name("aztask.app.App") is pkgutil.resolve_name("aztask.App")


@pytest.mark.parametrize(
    ("text", "paths"),
    [
        ("from aztask import App, Context", {"aztask.App", "aztask.Context"}),
        (
            "    from aztask.a import (\n    B,\n    C as D,\n)",
            {"aztask.a", "aztask.a.B", "aztask.a.C"},
        ),
        ("aztask = aztask.cli.main:main", {"aztask.cli.main.main"}),
        ("an aztask. Then", set()),
    ],
)
def test_the_paths_of_a_text(text, paths):
    assert publicpaths.paths_in(text) == paths
