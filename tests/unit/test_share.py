"""The share of a long suite that a commit draws: every test in its turn, and every file."""

from types import SimpleNamespace

import pytest
from share import drawn, share_of_environment

SIZES = {"tests/a.py": 30, "tests/b.py": 7, "tests/c.py": 1}
TESTS = [
    SimpleNamespace(nodeid=f"{file}::test_{number}[{broker}]")
    for file, size in SIZES.items()
    for number, broker in zip(range(size), ("local", "bus", "storage") * 10, strict=False)
]


def names_of(tests):
    return [test.nodeid for test in tests]


def test_each_file_keeps_its_share_in_its_order():
    kept = names_of(drawn(TESTS, 3, "a commit"))
    assert kept == [name for name in names_of(TESTS) if name in kept]
    counts = [sum(name.startswith(file) for name in kept) for file in SIZES]
    assert counts[0] == 10
    assert counts[1] in (2, 3)
    assert counts[2] in (0, 1)


def test_a_seed_draws_the_same_and_another_one_others():
    assert names_of(drawn(TESTS, 3, "x")) == names_of(drawn(list(TESTS), 3, "x"))
    assert names_of(drawn(TESTS, 3, "x")) != names_of(drawn(TESTS, 3, "y"))


def test_a_number_of_commits_runs_everything_and_each_test_about_as_often():
    often = dict.fromkeys(names_of(TESTS), 0)
    for commit in range(300):
        for name in names_of(drawn(TESTS, 3, str(commit))):
            often[name] += 1
    assert all(60 < times < 145 for times in often.values()), often


def test_a_share_of_one_is_everything():
    assert names_of(drawn(TESTS, 1, "x")) == names_of(TESTS)


def test_the_environment_says_the_share(monkeypatch):
    monkeypatch.delenv("TESTS_SHARE", raising=False)
    assert share_of_environment() is None
    monkeypatch.setenv("TESTS_SHARE", "3")
    monkeypatch.setenv("TESTS_SEED", "a commit")
    assert share_of_environment() == (3, "a commit")


@pytest.mark.parametrize(("share", "seed"), [("0", "x"), ("a third", "x"), ("-1", "x"), ("3", "")])
def test_a_share_that_cannot_be_drawn_is_an_error(monkeypatch, share, seed):
    monkeypatch.setenv("TESTS_SHARE", share)
    monkeypatch.setenv("TESTS_SEED", seed)
    with pytest.raises(ValueError, match=r"TESTS_SHARE=.* TESTS_SEED"):
        share_of_environment()
