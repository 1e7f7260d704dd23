"""Finding the app that ``-A`` names."""

import sys

import pytest

from aztask import App
from aztask.app.loading import load_app
from aztask.errors import ConfigurationError

APP = "from aztask import App\napp = App('shop')\nother = App('other')\n"


@pytest.fixture
def module(tmp_path, monkeypatch):
    """``module(text)``: an importable module's name."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)

    def make(text, name="loaded_shop"):
        sys.modules.pop(name, None)
        (tmp_path / f"{name}.py").write_text(text)
        return name

    yield make
    sys.modules.pop("loaded_shop", None)


def test_the_attribute_is_app_unless_it_is_given(module):
    name = module(APP)
    assert load_app(name).name == "shop"
    assert load_app(f"{name}:other").name == "other"


@pytest.mark.parametrize(
    ("text", "spec", "message"),
    [
        (APP, "loaded shop", "does not name an app; write module:attribute"),
        (APP, "no_such_module:app", "there is no module 'no_such_module'"),
        (APP, "loaded_shop:ap", "has no 'ap'. Did you mean 'app'?"),
        ("app = 7", "loaded_shop", "is a int, not an aztask.App"),
        ("raise SystemExit(3)", "loaded_shop", r"exits while it is imported \(status 3\)"),
        ("\n1 / 0", "loaded_shop", r"loaded_shop.py, line 2\): ZeroDivisionError: division"),
        ("x =\n", "loaded_shop", r"SyntaxError: invalid syntax \(loaded_shop.py, line 1\)"),
        ("import json\njson.loads('x')", "loaded_shop", r"loaded_shop.py, line 2\): JSONDecode"),
        (f"{APP}\nApp('x', lese=3)", "loaded_shop", r"Did you mean 'lease'.*_shop.py, line 5\)$"),
        (
            f"{APP}@app.task\ndef a(): ...\n@app.task\ndef a(): ...\n",
            "loaded_shop",
            r"two functions are registered as 'shop.a'.*_shop.py, line 6\)$",
        ),
        (f"{APP}\napp.include = ['shop.lost']", "loaded_shop", "include of app 'shop': there"),
    ],
)
def test_whatever_is_wrong_is_one_line(module, text, spec, message):
    module(text)
    with pytest.raises(ConfigurationError, match=message.replace("?", r"\?")) as caught:
        load_app(spec)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("spec", "instead"),
    [
        ("shop.py:app", "write shop:app"),
        ("shop.py", "write shop:app"),
        ("./tasks/shop.py:main", "write tasks.shop:main"),
    ],
)
def test_a_file_gets_a_hint(module, spec, instead):
    with pytest.raises(ConfigurationError) as caught:
        load_app(spec)
    assert str(caught.value).endswith(instead)


def test_a_module_that_the_app_includes_is_imported(module):
    name = module("from aztask import App\napp = App('shop', include=['nosuch_images'])\n")
    with pytest.raises(ConfigurationError, match="there is no module 'nosuch_images'"):
        load_app(name)


def test_a_wrong_setting_in_an_included_module_says_that_it_is_included(module, tmp_path):
    (tmp_path / "loaded_images.py").write_text("from aztask import App\nApp('x', lese=3)\n")
    name = module("from aztask import App\napp = App('shop', include=['loaded_images'])\n")
    with pytest.raises(ConfigurationError, match=r"^include of app 'shop': App 'x' has no") as e:
        load_app(name)
    assert str(e.value).endswith("loaded_images.py, line 2)")


@pytest.mark.parametrize("include", ["shop.images", 5, [5], [""], ["shop/images.py"]])
def test_include_takes_module_names(include):
    with pytest.raises(ConfigurationError, match=r"^include takes "):
        App("shop", include=include)
