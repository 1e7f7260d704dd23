"""The pictures in the documentation are what their scripts draw, readable, and true."""

import importlib.util
import re
import sys
from pathlib import Path
from xml.etree import ElementTree

import pytest
import test_architecture

PICTURES = Path(__file__).parents[2] / "docs" / "pictures"
MODULES = sorted(path.stem for path in PICTURES.glob("*.py"))


@pytest.fixture(scope="module")
def modules():
    """The modules beside the pictures, by name. Their names are free for others afterwards."""
    before = {name: sys.modules.pop(name) for name in MODULES if name in sys.modules}
    sys.path.insert(0, str(PICTURES))
    try:
        yield {name: importlib.import_module(name) for name in MODULES}
    finally:
        sys.path.remove(str(PICTURES))
        for name in MODULES:
            sys.modules.pop(name, None)
        sys.modules.update(before)


@pytest.fixture
def canvas(modules):
    return modules["canvas"].Canvas(200, 100, "a picture")


def test_the_committed_pictures_are_the_drawn_ones(modules):
    drawn = modules["draw"].drawn()
    stale = [
        path.name
        for path, text in drawn.items()
        if not path.exists() or path.read_text(encoding="utf-8") != text
    ]
    assert not stale, f"{', '.join(stale)}: run python docs/pictures/draw.py"
    assert {path.name for path in PICTURES.glob("*.svg")} == {path.name for path in drawn}


def test_every_module_is_drawn(modules):
    drawing = {name for name, module in modules.items() if hasattr(module, "draw")} - {"draw"}
    assert drawing == {module.__name__ for module in modules["draw"].PICTURES}


@pytest.mark.parametrize("path", sorted(PICTURES.glob("*.svg")), ids=lambda path: path.stem)
def test_a_picture_has_both_themes_a_title_and_only_known_colours(path):
    text = path.read_text(encoding="utf-8")
    root = ElementTree.fromstring(text)
    assert root.find("{http://www.w3.org/2000/svg}title").text
    light, _, dark = text.partition("@media (prefers-color-scheme: dark)")
    dark = dark.partition("text {")[0]
    names = set(re.findall(r"var\((--[\w-]+)\)", text))
    for name in names:
        assert f"{name}: #" in light and f"{name}: #" in dark
    classes = {each for names in re.findall(r'class="([^"]+)"', text) for each in names.split()}
    style = text[text.index("<style>") : text.index("</style>")]
    assert {each for each in classes if f".{each} " not in style} == set()


def test_a_text_that_is_cut_off_is_refused(canvas):
    canvas.text(150, 50, "this text is too long")
    with pytest.raises(ValueError, match="'this text is too long' is cut off"):
        canvas.svg()


def test_a_text_that_covers_another_is_refused(canvas):
    canvas.text(20, 50, "one")
    canvas.text(30, 54, "two")
    with pytest.raises(ValueError, match="'one' and 'two' overlap"):
        canvas.svg()


def test_a_text_that_is_wider_than_its_box_is_refused(canvas):
    canvas.box(20, 20, 40, 40, "too wide for it")
    with pytest.raises(ValueError, match="in a box of 40"):
        canvas.svg()


def test_a_box_outside_of_the_picture_is_refused(canvas):
    canvas.box(180, 20, 40, 40)
    with pytest.raises(ValueError, match="a box at 180, 20 is cut off"):
        canvas.svg()


def test_texts_beside_each_other_are_fine(canvas):
    canvas.text(20, 30, "a < b & c", "bold")
    canvas.text(20, 50, "below")
    canvas.arrow((20, 60), (80, 60), both=True)
    assert "a &lt; b &amp; c" in canvas.svg()
    assert canvas.svg().count("<polygon") == 2


def test_the_packages_are_drawn_in_the_layers_that_hold(modules):
    drawn = {name: set(parts.split()) for name, parts, _ in modules["packages"].LAYERS}
    layers = {name: set(parts.split()) for name, parts in test_architecture.LAYERS.items()}
    scripts = {"__init__", "__main__"}
    assert drawn == {name: parts - scripts for name, parts in layers.items()}
    assert [*drawn] == [*layers][::-1]
