"""The options of unique tasks, and the key that arguments make."""

import inspect
from types import SimpleNamespace

import pytest

from aztask import App
from aztask.errors import ConfigurationError, EncodeError
from aztask.message.codec import Codec
from aztask.typed.conversion import Conversion
from aztask.uniqueness.rules import UniqueRules, key_of, unique_rules


def task_of(function, *, name="shop.add", with_context=False):
    signature = inspect.signature(function)
    conversion = Conversion(name, function, signature, with_context=with_context, strict=False)
    return SimpleNamespace(
        name=name, signature=signature, with_context=with_context, conversion=conversion
    )


def key(function, *args, rules=None, **kwargs):
    rules = rules or unique_rules({"unique": "arguments"}, "task")
    return key_of(Codec(), task_of(function), rules, args, kwargs)


def add(a, b=2, *more, scale=1.0, **others):
    return a + b


def test_arguments_are_bound_to_the_signature_first():
    usual = key(add, 1, 2)
    assert key(add, 1) == usual == key(add, b=2, a=1) == key(add, 1, 2, scale=1.0)
    assert len({usual, key(add, 2, 1), key(add, 1, 3), key(add, 1, 2, 3), key(add, 1, x=1)}) == 5


def test_equal_maps_have_one_key_whatever_their_order():
    one, other = {"a": 1, "b": [{"x": 1, "y": 2}]}, {"b": [{"y": 2, "x": 1}], "a": 1}
    assert key(add, one) == key(add, other)
    assert key(add, {"a": 1}) != key(add, {"a": 2})
    assert key(add, 1, x=1, y=2) == key(add, 1, y=2, x=1)


def test_values_of_different_types_differ():
    keys = {key(add, value) for value in (1, "1", b"1", [1], {"1": 1}, None)}
    assert len(keys) == 6


def test_the_context_is_no_argument():
    def crawl(context, url):
        return url

    rules = unique_rules({"unique": "arguments"}, "task")
    with_context = task_of(crawl, with_context=True)
    plain = task_of(lambda url: url)
    assert key_of(Codec(), with_context, rules, ("a",), {}) == key_of(
        Codec(), plain, rules, (), {"url": "a"}
    )


def test_a_function_makes_the_key():
    rules = unique_rules({"unique": lambda order, **_: order["id"]}, "task")
    assert key(add, {"id": 7, "n": 1}, rules=rules) == key(add, {"id": 7, "n": 2}, rules=rules)
    assert key(add, {"id": 7}, rules=rules) != key(add, {"id": 8}, rules=rules)


def test_tasks_never_share_a_key():
    rules = unique_rules({"unique": lambda *args: "same"}, "task")
    one, two = (key_of(Codec(), task_of(add, name=name), rules, (1,), {}) for name in ("a", "b"))
    assert one != two


def test_what_no_message_can_hold_makes_no_key():
    with pytest.raises(EncodeError):
        key(add, object())


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({}, None),
        ({"unique": "arguments"}, UniqueRules(None, "finished", 0.0, "return", 86400.0)),
        (
            {"unique": "arguments", "until": "started", "on_conflict": "raise", "unique_life": 60},
            UniqueRules(None, "started", 0.0, "raise", 60.0),
        ),
        ({"unique": "arguments", "until": 5}, UniqueRules(None, "", 5.0, "return", 5.0)),
        (
            {"debounce": 5, "unique": add},
            UniqueRules(add, "quiet", 5.0, "return", 86400.0),
        ),
        (
            {"debounce": 5, "unique": "arguments", "unique_life": 5},
            UniqueRules(None, "quiet", 5.0, "return", 5.0),
        ),
        ({"throttle": 60}, UniqueRules(None, "", 60.0, "drop", 60.0)),
        ({"throttle": 60, "unique": add}, UniqueRules(add, "", 60.0, "drop", 60.0)),
    ],
)
def test_options_become_rules(options, expected):
    assert unique_rules(options, "task") == expected


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"unique": True}, 'unique takes "arguments" or a function .* not True'),
        ({"unique": "args"}, "unique takes"),
        ({"unique": "arguments", "until": "done"}, "until takes 'started' or 'finished'"),
        ({"unique": "arguments", "until": 0}, "until takes seconds above 0"),
        ({"unique": "arguments", "on_conflict": "fail"}, "on_conflict takes 'return'"),
        ({"unique": "arguments", "unique_life": -1}, "unique_life takes seconds above 0"),
        ({"until": "started"}, 'until needs unique="arguments"'),
        ({"on_conflict": "drop"}, 'on_conflict needs unique="arguments"'),
        ({"unique_life": 5}, 'unique_life needs unique="arguments"'),
        ({"throttle": 5, "on_conflict": "drop"}, "throttle and on_conflict exclude each other"),
        ({"throttle": 5, "unique_life": 9}, "throttle and unique_life exclude each other"),
        ({"throttle": 5, "unique": 7}, "unique takes"),
        ({"debounce": 5, "unique": 7}, "unique takes"),
        ({"debounce": 5, "unique": add, "throttle": 5}, "debounce and throttle exclude"),
        ({"debounce": 5, "unique": add, "on_conflict": "drop"}, "debounce and on_conflict excl"),
        ({"debounce": 0, "unique": add}, "debounce takes seconds above 0"),
        ({"debounce": 5, "unique": add, "unique_life": 0}, "unique_life takes seconds above 0"),
        ({"throttle": 5, "until": "started"}, "throttle and until exclude each other"),
        ({"debounce": 5}, "debounce needs unique=a function"),
        ({"debounce": 5, "unique": add, "until": "started"}, "debounce and until exclude"),
        ({"debounce": 5, "unique": add, "unique_life": 4}, "at least as long as debounce"),
        ({"throttle": "1m"}, "throttle takes seconds above 0"),
    ],
)
def test_wrong_options_say_what_to_write(options, words):
    app = App("shop", broker="local://:memory:")
    with pytest.raises(ConfigurationError, match=words):
        app.task(**options)(add)


def test_a_key_is_the_same_in_every_release():
    """Workers of two releases share the keys while they run together."""
    assert (
        key(add, {"b": 1, "a": [2, {"x": None}]})
        == "shop.add:236d457d6b55a5b61892be5488b11df48c99cfeb"
    )
    assert key(add, 1, x="y") == "shop.add:c8628a87dd4466d0ec0b140df377c0c802c1c53d"


def test_maps_with_keys_of_several_types_have_a_key():
    assert key(add, {1: "a", "b": 2}) == key(add, {"b": 2, 1: "a"})
