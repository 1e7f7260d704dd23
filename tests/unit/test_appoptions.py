"""What is written from the table of settings is up to date."""

import importlib.util
from pathlib import Path
from types import SimpleNamespace

import pytest

from aztask.app.options import AppOptions, QueueOptionNames
from aztask.config import QueueSettings, Settings

GENERATOR = Path(__file__).parents[2] / "docs" / "generate" / "settings.py"


@pytest.fixture(scope="module")
def generator():
    spec = importlib.util.spec_from_file_location("generate_settings", GENERATOR)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_options_are_those_of_the_table(generator):
    assert generator.OPTIONS.read_text() == generator.options(), "run docs/generate/settings.py"


def test_the_reference_is_that_of_the_table(generator):
    text = generator.REFERENCE.read_text()
    assert text == generator.page(text), "run docs/generate/settings.py"


@pytest.mark.parametrize(("options", "kind"), [(AppOptions, Settings), (QueueOptionNames, None)])
def test_every_option_is_taken(options, kind, generator):
    """The example of each in the reference is a value that it takes."""
    table = generator.table_of(kind or QueueSettings)
    names = {generator.option_of(field): row for field, row in table.items()}
    nothing = SimpleNamespace(name="vault", encode=len, decode=len)
    given = {
        "key": "k" * 32,
        "connection_string": "UseDevelopmentStorage=true",
        "VaultCodec": lambda: nothing,
    }
    for name in options.__annotations__:
        value = eval(names[name].example, given)
        beside = {
            "events_container": {"events": "e"},
            "events_account": {"events": "e", "events_container": "events"},
            "lease_advice_account": {"lease_advice": "advice"},
            "payloads_account": {"payloads": "large"},
        }.get(name, {})
        if kind is Settings:
            assert Settings.from_options({**beside, name: value})
        else:
            assert QueueSettings.from_options("q", {name: value})
