"""Names of tasks: the same in every program, whatever it imports, and never two of one name."""

import importlib
import sys

import pytest

from aztask import App, ConfigurationError, DuplicateTask

SHOP = """
from aztask import App

app = App("shop", broker="local://:memory:")
"""
TASK = """
from naming_shop import app

@app.task{options}
def resize(path):
    return __name__ + path
"""


@pytest.fixture
def modules(tmp_path, monkeypatch):
    """Makes modules of one app, each with a task ``resize``; returns how to import them."""
    monkeypatch.syspath_prepend(str(tmp_path))
    (tmp_path / "naming_shop.py").write_text(SHOP)

    def make(**options):
        for name, text in options.items():
            (tmp_path / f"{name}.py").write_text(TASK.format(options=text))
        return importlib.import_module

    yield make
    for name in list(sys.modules):
        if name.startswith("naming_"):
            del sys.modules[name]


def test_two_functions_of_one_name_are_both_named_with_what_to_write(modules):
    load = modules(naming_images="", naming_films="")
    load("naming_images")
    with pytest.raises(DuplicateTask) as caught:
        load("naming_films")
    assert str(caught.value) == (
        "two functions are registered as 'shop.resize': naming_images.resize and "
        "naming_films.resize; give one of them a name, for example "
        "@app.task(name='shop.naming_films.resize')"
    )


@pytest.mark.parametrize(
    "order", [("naming_images", "naming_films"), ("naming_films", "naming_images")]
)
def test_with_that_name_both_work_and_names_do_not_depend_on_the_order(modules, order):
    load = modules(naming_images="", naming_films="(name='shop.naming_films.resize')")
    for name in order:
        load(name)
    tasks = load("naming_shop").app.tasks
    assert sorted(tasks) == ["shop.naming_films.resize", "shop.resize"]
    assert tasks["shop.resize"]("a") == "naming_imagesa"
    assert tasks["shop.naming_films.resize"]("a") == "naming_filmsa"


def test_a_file_that_is_imported_twice_is_said_to_be(modules, tmp_path, monkeypatch):
    load = modules(naming_images="")
    load("naming_images")
    (tmp_path / "naming_package").mkdir()
    monkeypatch.syspath_prepend(str(tmp_path / "naming_package"))
    spec = importlib.util.spec_from_file_location("__main__", tmp_path / "naming_images.py")
    again = importlib.util.module_from_spec(spec)
    with pytest.raises(
        DuplicateTask, match="imported twice: as module naming_images and as __main"
    ):
        spec.loader.exec_module(again)


@pytest.mark.parametrize(
    ("function", "message"),
    [
        (
            "resize",
            r"a task is a function, not 'resize'; options need their names, .*name='resize'",
        ),
        (7, "a task is a function, not 7"),
    ],
)
def test_what_is_no_function_is_refused(function, message):
    app = App("shop", broker="local://:memory:")
    with pytest.raises(ConfigurationError, match=message):
        app.task(function)


def test_a_callable_without_a_name_needs_one():
    class Resize:
        def __call__(self, path):
            return path

    app = App("shop", broker="local://:memory:")
    with pytest.raises(ConfigurationError, match=r"has no name of its own; write app.task\(name="):
        app.task(Resize())
    assert app.task(name="shop.resize")(Resize())("a") == "a"
