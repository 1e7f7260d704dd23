"""Checks of settings: the value to keep, or one line that names the setting."""

from datetime import timedelta
from pathlib import Path

import pytest

from aztask.errors import ConfigurationError
from aztask.support import checks
from aztask.support.display import Secret

KEY = "k" * 16


@pytest.mark.parametrize(
    ("check", "value", "kept"),
    [
        (checks.seconds(), timedelta(minutes=1), 60.0),
        (checks.seconds(least=1.0), 1, 1.0),
        (checks.count(most=5), 5, 5),
        (checks.flag, True, True),
        (checks.text, "orders", "orders"),
        (checks.part(0.1, 0.8, never=1.0), 0.8, 0.8),
        (checks.part(0.1, 0.8, never=1.0), 1, 1.0),
        (checks.one_of(("a", "b"), "a letter"), "b", "b"),
        (checks.some_of(("a", "b"), "a letter"), ["b", "a"], ("b", "a")),
        (checks.secret, "x", Secret("x")),
        (checks.secrets(16), [KEY], (Secret(KEY),)),
        (checks.directory, Path("events"), "events"),
    ],
)
def test_a_right_value_is_kept(check, value, kept):
    assert check("setting", value) == kept


@pytest.mark.parametrize(
    ("check", "value", "message"),
    [
        (checks.seconds(least=1.0), 0.5, "setting is 0.5; it must be at least 1 seconds"),
        (checks.count(), True, "setting is a whole number, not True"),
        (checks.count(most=5), 6, "setting is 6; give 1 to 5"),
        pytest.param(checks.count(most=5), 10**5000, "more than 38 digits", id="huge"),
        (checks.flag, 1, "setting is True or False, not 1"),
        (checks.text, "", "setting is a text that is not empty"),
        (checks.part(0.1, 0.8, never=1.0), 0.9, "give a part of the lease, 0.1 to 0.8"),
        (checks.part(0.1, 0.8, never=1.0), float("nan"), "setting is"),
        (checks.one_of(("alpha", "beta"), "a letter"), "alpa", "Did you mean 'alpha'"),
        (checks.some_of(("a", "b"), "a letter"), [], "setting"),
        (checks.secrets(16), KEY, "setting is a list of keys; write"),
        (checks.secrets(16), ["secret"], "signing key 1 is shorter than 16 characters"),
        (checks.directory, 7, "setting is the path of a directory, not 7"),
    ],
)
def test_a_wrong_value_is_one_line_that_names_the_setting(check, value, message):
    with pytest.raises(ConfigurationError) as caught:
        check("setting", value)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)
    assert "secret" not in str(caught.value).replace("secrets", "")
