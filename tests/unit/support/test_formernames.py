"""Former names of modules import the module itself."""

import ast
import subprocess
import sys
from importlib import import_module

import pytest

from aztask.support.formernames import FORMER

DOCUMENTED = {"aztask.deadletters.view": ("DeadLetters", "Selection")}
"""What the documentation of earlier releases imported from them."""


@pytest.mark.parametrize("name", sorted(FORMER))
def test_a_former_name_is_the_module_itself(name):
    module = import_module(name)
    assert module is import_module(FORMER[name])
    assert module.__name__ == FORMER[name]
    assert module.__spec__.name == FORMER[name]


@pytest.mark.parametrize("name", sorted(DOCUMENTED))
def test_what_documentation_imported_is_still_there(name):
    module, now = import_module(name), import_module(FORMER[name])
    for each in DOCUMENTED[name]:
        assert getattr(module, each) is getattr(now, each)


def test_a_program_may_import_only_the_former_name():
    code = (
        "import sys\n"
        "from aztask.deadletters.view import DeadLetters as former\n"
        "from aztask.operate.deadletters.view import DeadLetters\n"
        "import aztask.deadletters\n"
        "print([former is DeadLetters, aztask.deadletters.DeadLetters is former])"
    )
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert ast.literal_eval(ended.stdout) == [True, True]


def test_other_modules_are_not_found_by_it():
    with pytest.raises(ModuleNotFoundError, match=r"aztask\.deadletters\.nothing"):
        import_module("aztask.deadletters.nothing")
