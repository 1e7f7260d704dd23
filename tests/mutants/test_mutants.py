"""The tool itself: which mutants it makes, which it draws, and that it tells survivors apart."""

from __future__ import annotations

import ast
import importlib
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

pytest.importorskip("mutmut", reason="mutmut is installed by `tox -e mutants`")

from . import marks, planted, trying
from .copies import MARK, token
from .making import mutants_of
from .modules import MODULES, Source, find
from .reach import Reach, is_local

ROOT = Path(__file__).parents[2]


def changes(text, name="aztask.made"):
    source = Source(name, Path("made.py"), text)
    return [(mutant.function, mutant.before, mutant.after) for mutant in mutants_of(source)]


def afters(line):
    """What becomes of one line in a function."""
    return {after for _, _, after in changes(f"def f(a, b, c):\n    {line}\n")}


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("return a < b", {"return a <= b"}),
        ("return a == b", {"return a != b"}),
        ("return a and b", {"return a", "return b"}),
        ("return not a", {"return a"}),
        ("return a + 1", {"return a - 1", "return a + 2"}),
        ("return min(a, b)", {"return max(a, b)"}),
        ("return a if b else c", {
            "return a if (b) and False else c", "return a if (b) or True else c",
        }),
        ("a.b = c()", {"a.b = None"}),
        ("a.b = True", {"a.b = False"}),
        ("a.b = c", set()),
        ("a = b()", set()),
        ("a(b)", {"pass"}),
        ("a(b, c=1)", {"pass", "a(b, )", "a(b, c=2)"}),
        ("raise ValueError('text')", {"pass"}),
        ("...", set()),
        ("return 'key'", {"return 'XXkeyXX'"}),
        ("return 'text for people'", set()),
        ("logger.info('text %s', a)", set()),
        ("hit('here')", set()),
        ("assert a is not None", set()),
        ("return zip(a, b, strict=True)", set()),
        ("x: int | None = a", set()),
    ],
)  # fmt: skip
def test_what_becomes_of_a_line(line, expected):
    assert afters(line) == expected


def test_a_condition_is_made_true_and_false_and_a_guard_is_taken_away():
    text = "def f(a):\n    if a is None:\n        return\n    while a:\n        break\n"
    assert set(changes(text)) == {
        ("f", "if a is None:", "if False:"),
        ("f", "if a is None:", "if True:"),
        ("f", "return", "pass"),
        ("f", "while a:", "while False:"),
        ("f", "break", "return"),
    }


def test_a_case_can_be_passed_over():
    text = "def f(a):\n    match a:\n        case int():\n            return 'x'\n"
    assert ("f", "case int():", "case int() if False:") in changes(text)


def test_sql_is_changed_wherever_it_is_written():
    text = 'ROW = f"UPDATE t SET a = NULL WHERE b = ? AND c = d AND e > {2}"\n'
    got = {after for _, _, after in changes(text)}
    assert 'ROW = f"UPDATE t SET a = a WHERE b = ? AND c = d AND e > {2}"' in got
    assert 'ROW = f"UPDATE t SET a = NULL WHERE (1 OR ?) AND c = d AND e > {2}"' in got
    assert 'ROW = f"UPDATE t SET a = NULL WHERE b = ? AND e > {2}"' in got
    assert 'ROW = f"UPDATE t SET a = NULL WHERE b = ? AND c = d AND e >= {2}"' in got
    assert 'ROW = f"UPDATE t SET a = NULL WHERE b = ? AND c = d OR e > {2}"' in got


def test_properties_class_fields_defaults_and_constants_are_changed_too():
    text = (
        "LIMIT = 5\nclass A:\n    b: int = 1\n    @property\n    def c(self):\n"
        "        return self.b > 2\n    def d(self, e=True):\n        return e\n"
    )
    places = {(function, after) for function, _, after in changes(text)}
    assert ("", "LIMIT = 6") in places
    assert ("A", "b: int = 2") in places
    assert ("A.c", "return self.b >= 2") in places
    assert ("A.d", "def d(self, e=False):") in places
    at_import = {
        mutant.after: mutant.at_import for mutant in mutants_of(Source("a", Path("a"), text))
    }
    assert at_import["LIMIT = 6"]
    assert at_import["b: int = 2"]
    assert at_import["def d(self, e=False):"]
    assert not at_import["return self.b >= 2"]


def test_what_a_class_derives_from_is_left_alone():
    """With `A & None` for `A | None` no test could import the module: that says nothing of them."""
    assert changes("class Stage(Work[Item | None]):\n    pass\n") == []


def test_mutants_that_look_alike_are_counted():
    text = "def f(a):\n    a.b()\n    a.b()\n"
    same = [mutant.same for mutant in mutants_of(Source("a", Path("a"), text))]
    assert same == [1, 2]


@pytest.mark.parametrize("source", find(MODULES), ids=lambda source: source.name)
def test_every_core_module_is_there_and_all_of_its_mutants_are_programs(source):
    made = mutants_of(source)
    assert made
    assert len({mutant.key for mutant in made}) == len(made)
    for mutant in made[:: max(1, len(made) // 20)]:
        ast.parse(mutant.code)
        assert mutant.code != source.text


def test_short_names_tell_the_core_modules_apart():
    names = [source.short for source in find(MODULES)]
    assert len(set(names)) == len(names)


def test_a_module_that_is_not_there_is_named():
    with pytest.raises(SystemExit, match=r"aztask\.nowhere does not exist"):
        find(["aztask.nowhere"])


def test_every_mark_fits_a_mutant():
    known = {mutant.key for source in find(MODULES) for mutant in mutants_of(source)}
    assert [key for key in marks.read() if key not in known] == []


def test_a_mark_is_read_as_it_is_written(tmp_path):
    mutants = mutants_of(Source("aztask.a", Path("a"), "X = 1\ndef f(a):\n    a()\n    a()\n"))
    path = tmp_path / "marks.txt"
    path.write_text("# why\n\n" + "\n\n".join(marks.write(each, "so") for each in mutants) + "\n")
    assert marks.read(path) == {mutant.key: "so" for mutant in mutants}
    path.write_text("a f\n- x\n+ y\n")
    with pytest.raises(SystemExit, match="four lines"):
        marks.read(path)
    path.write_text("\n\n".join(marks.write(mutants[0], "so") for _ in range(2)))
    with pytest.raises(SystemExit, match="two marks"):
        marks.read(path)
    path.write_text(marks.write(mutants[0]))
    with pytest.raises(SystemExit, match="no reason"):
        marks.read(path)


def test_a_change_is_tried_with_the_tests_of_its_lines_nearest_first():
    source = Source("aztask.made", Path("made.py"), "X = 1\ndef f(a):\n    return a + X\n")
    reach = Reach(
        {
            "tests/unit/test_other.py::a": 0.1,
            "tests/unit/test_made.py::b": 5.0,
            "tests/c.py::c": 1.0,
        },
        {"made.py": {1: [""], 3: ["tests/unit/test_other.py::a", "tests/unit/test_made.py::b"]}},
    )
    constant, *_, inner = mutants_of(source)
    expected = [["tests/unit/test_made.py::b"], ["tests/unit/test_other.py::a"]]
    assert reach.tests(inner) == expected
    assert reach.tests(constant) == expected
    assert Reach(reach.seconds, {}).tests(inner) == []
    assert Reach(reach.seconds, {}).tests(constant) == [["tests/unit/test_made.py::b"]]
    others = Source("aztask.unheard", source.path, source.text)
    assert len(Reach(reach.seconds, {}).tests(mutants_of(others)[0])[0]) == 3


def test_only_the_local_broker_and_store_are_tried_with():
    assert is_local("tests/unit/queues/lease/test_state.py::test_a[servicebus]")
    assert is_local("tests/contract/test_contract_leases.py::test_a[local-memory-x]")
    assert is_local("tests/contract/test_contract_payloads.py::test_a[folder]")
    assert is_local("tests/contract/test_contract_owners.py::test_a")
    assert not is_local("tests/contract/test_contract_leases.py::test_a[servicebus]")
    assert not is_local("tests/contract/test_contract_results.py::test_a[tables]")


# -- a run -------------------------------------------------------------------------------------


def run(*options, path=None):
    """Run the tool; `path` comes before all others when it imports."""
    done = subprocess.run(
        [sys.executable, "-m", "tests.mutants", "--processes", "1", *options],
        cwd=ROOT, env={**os.environ, "PYTHONPATH": str(path or "")},
        capture_output=True, text=True, timeout=280, check=False,
    )  # fmt: skip
    return done.returncode, done.stdout + done.stderr


def test_a_run_tells_noticed_from_survived_and_changes_no_file():
    module = ROOT / "aztask" / "settlement.py"
    before = module.read_bytes()
    command = ["--module", "aztask.settlement", "--draw", "6", "--seed", "3", "--verbose"]
    code, out = run(*command, "--tests", "tests/unit/test_settlement.py")
    assert code == 0, out
    assert "6 of 6 mutants were noticed" in out
    assert "tests/unit/test_settlement.py::" in out
    code, out = run(*command, "--tests", "tests/unit/support/test_threadpool.py")
    assert code == 1
    assert out.count("# survived: settlement.py:") == 6
    assert "too low" in out
    assert module.read_bytes() == before


def test_a_mutant_that_the_tests_do_not_load_ends_the_run(tmp_path):
    """As if an import hook, or another copy of the package, came before the mutant."""
    (tmp_path / "sitecustomize.py").write_text(
        "import builtins, pathlib\n"
        "opened = pathlib.Path.write_text\n"
        "def write(path, text, **options):\n"
        "    text = text.replace('__mutant__ =', '__other__ =')\n"
        "    return opened(path, text, **options)\n"
        "pathlib.Path.write_text = write\n"
    )
    command = ["--module", "aztask.settlement", "--draw", "1"]
    code, out = run(*command, "--tests", "tests/unit/test_settlement.py", path=tmp_path)
    assert code == 2
    assert "the run is blind: the tests did not load the mutant" in out


@pytest.mark.parametrize("text", ["LIMIT = 2", "LIMIT = 1 / 0"])
def test_tests_that_do_not_load_the_module_are_not_blind_to_what_runs_at_its_import(
    tmp_path, monkeypatch, text
):
    """As in a small draw, whose tests may not reach a module, or with one that is broken."""
    module = tmp_path / "aside_module.py"
    module.write_text("LIMIT = 1\n")
    [mutant] = mutants_of(Source("aside_module", module, module.read_text()))
    mutant = replace(mutant, start=0, end=len("LIMIT = 1"), text=text)
    monkeypatch.syspath_prepend(str(tmp_path))
    assert mutant.at_import

    def runs(written: str) -> bool:
        module.write_text(written)
        sys.modules.pop("aside_module", None)
        importlib.invalidate_caches()
        return trying._runs_mutants(mutant, 0)

    assert runs(f"{mutant.code}\n{MARK} = {token(mutant)!r}\n")
    assert runs("LIMIT = 1\n") is False, "another source than the mutant's would be loaded"
    sys.modules.pop("aside_module", None)
    assert not trying._runs_mutants(replace(mutant, at_import=False), 0)


def test_a_run_is_blind_whose_planted_mutant_is_not_noticed(tmp_path):
    (tmp_path / "sitecustomize.py").write_text(
        "import pathlib\n"
        "opened = pathlib.Path.write_text\n"
        "def write(path, text, **options):\n"
        "    changed = 'if message.resubmit_count > self.max_retries:'\n"
        "    text = text.replace(changed, changed.replace('>', '>='))\n"
        "    return opened(path, text, **options)\n"
        "pathlib.Path.write_text = write\n"
    )
    command = ["--module", "aztask.settlement", "--draw", "1"]
    code, out = run(*command, "--tests", "tests/unit/test_settlement.py", path=tmp_path)
    assert code == 2
    assert "the run is blind: the planted mutant retry RetryPolicy._retry" in out
    assert "was not noticed" in out


def test_a_planted_mutant_that_changes_nothing_has_the_text_of_its_module():
    assert planted.unchanged().code == planted.noticed().source.text
    assert planted.noticed().code != planted.noticed().source.text


def test_a_small_draw_tries_other_modules_for_another_seed():
    listed = [run("--small", "--list", "--seed", seed)[1] for seed in ("a1", "a1", "b2")]
    assert listed[0] == listed[1]
    assert listed[0] != listed[2]
    assert listed[0].count("\n+ ") == 12


def test_a_seed_draws_the_same_again_and_another_one_others():
    command = ["--module", "aztask.queues.lease.state", "--draw", "5", "--list"]
    first, again, other = (run(*command, "--seed", seed) for seed in ("1", "1", "2"))
    assert first == again
    assert first != other
    assert first[1].count("\nlease.state ") == 4


def test_tests_that_fail_by_themselves_end_the_run(tmp_path):
    broken = ROOT / "tests" / "unit" / "support" / "test_threadpool.py"
    code, out = run(
        "--module", "aztask.queues.lease.state", "--tests", str(broken.relative_to(ROOT)) + "::no"
    )
    assert code == 1
    assert "the tests fail without any change" in out
