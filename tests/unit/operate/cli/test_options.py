import click
import pytest

from aztask.operate.cli.options import (
    Duration,
    JsonValue,
    NameList,
    WeightedNames,
    all_names,
    split_weights,
)


@pytest.mark.parametrize(
    ("text", "seconds"), [("30s", 30.0), ("1h30m", 5400.0), ("250ms", 0.25), ("2", 2.0), (1.5, 1.5)]
)
def test_durations(text, seconds):
    assert Duration().convert(text, None, None) == seconds


@pytest.mark.parametrize("text", ["nan", "inf", "-1", "", "1e9", "s", "1s1s", "9" * 20, "1\n"])
def test_what_is_no_duration_is_refused(text):
    with pytest.raises(click.BadParameter):
        Duration(least=1.5).convert(text, None, None)


def test_a_duration_out_of_range_names_the_range():
    with pytest.raises(click.BadParameter, match=r"'0' is not between 0\.1 and 10 seconds"):
        Duration(least=0.1, most=10.0).convert("0", None, None)


def test_json():
    assert JsonValue(list).convert("[1, null]", None, None) == [1, None]
    assert JsonValue(dict).convert('{"a": 1}', None, None) == {"a": 1}
    assert JsonValue(list).convert([1], None, None) == [1]


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "is not valid JSON"),
        ("{}", "is not a JSON list"),
        ("1", "is not a JSON list"),
        ("[NaN]", "NaN is not JSON"),
        ("[-Infinity]", "-Infinity is not JSON"),
        ("[1", "is not valid JSON"),
        ("[" * 100_000, "nested too deeply"),
        ("[1" + "0" * 5000 + "]", "limit"),
        ("[\x1b[31m]", "\\\\x1b"),
    ],
    ids=range(9),
)
def test_what_is_not_the_json_asked_for_is_refused(text, words):
    with pytest.raises(click.BadParameter, match=words) as caught:
        JsonValue(list).convert(text, None, None)
    assert len(caught.value.message) < 300


def test_names():
    assert NameList().convert("a,b,a", None, None) == ("a", "b")
    assert all_names([("a", "b"), ("b", "c")]) == ("a", "b", "c")


@pytest.mark.parametrize("text", ["", ",", "a,", "a,,b"])
def test_empty_names_are_refused(text):
    with pytest.raises(click.BadParameter, match="empty name"):
        NameList().convert(text, None, None)


def test_names_may_have_spaces_around_them():
    assert NameList().convert("mail, default ,mail", None, None) == ("mail", "default")


def test_queues_may_have_weights():
    names = WeightedNames().convert("high:4, low:1,mail", None, None)
    assert split_weights(names) == (("high", "low", "mail"), {"high": 4, "low": 1})
    assert split_weights(all_names([("a:1", "b"), ("a:3",)])) == (("a", "b"), {"a": 3})


@pytest.mark.parametrize("text", ["a:", ":4", "a:x", "a:-1", "a:1.5", "a:1000", "a:\u0663"])
def test_a_wrong_weight_is_refused(text):
    with pytest.raises(click.BadParameter, match="wrong weight"):
        WeightedNames().convert(text, None, None)
