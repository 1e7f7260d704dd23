"""Finding the app that ``-A`` names."""

import sys

import pytest

from aztask.errors import ConfigurationError
from aztask.loading import load_app

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
        ("1 / 0", "loaded_shop", "cannot be imported: ZeroDivisionError: division by zero"),
    ],
)
def test_whatever_is_wrong_is_one_line(module, text, spec, message):
    module(text)
    with pytest.raises(ConfigurationError, match=message.replace("?", r"\?")) as caught:
        load_app(spec)
    assert "\n" not in str(caught.value)
