"""A settings class: declared once, checked, and read from options and the environment."""

from dataclasses import dataclass

import pytest

from aztask.errors import ConfigurationError
from aztask.support.checks import count, seconds
from aztask.support.settings import (
    check_all,
    fields_of,
    inherited,
    option_of,
    read_environment,
    setting,
    table_of,
)


@dataclass(frozen=True, slots=True)
class Oven:
    heat_seconds: float = setting(5.0, "float", seconds(), "How long.", example="3.0")
    trays: int = setting(1, "int", count(most=4), "How many.", example="2", variable="OVEN")

    def __post_init__(self):
        check_all(self)


@dataclass(frozen=True, slots=True)
class Tray:
    heat_seconds: float | None = inherited(Oven, "heat_seconds")

    def __post_init__(self):
        check_all(self)


def test_each_field_is_checked_and_keeps_what_its_check_returns():
    assert Oven(heat_seconds=3) == Oven(3.0)
    with pytest.raises(ConfigurationError, match="trays is 5; give 1 to 4"):
        Oven(trays=5)


def test_an_inherited_field_may_be_left_open():
    assert Tray().heat_seconds is None
    assert Tray(heat_seconds=2).heat_seconds == 2.0
    assert table_of(Tray)["heat_seconds"].optional
    assert table_of(Oven)["trays"].variable == "OVEN"


def test_options_may_leave_out_the_unit():
    assert option_of("heat_seconds") == "heat"
    assert fields_of(Oven, {"heat": 1, "trays": 2}, "the oven") == {"heat_seconds": 1, "trays": 2}
    with pytest.raises(ConfigurationError, match="the oven has no option 'tray'"):
        fields_of(Oven, {"tray": 1}, "the oven")
    with pytest.raises(ConfigurationError, match="is given heat_seconds twice"):
        fields_of(Oven, {"heat": 1, "heat_seconds": 2}, "the oven")


def test_a_variable_or_the_file_that_another_one_names(tmp_path):
    file = tmp_path / "secret"
    file.write_text("s3cret\n")
    assert read_environment("KEY", {"KEY": "direct"}) == "direct"
    assert read_environment("KEY", {"KEY_FILE": str(file)}) == "s3cret"
    assert read_environment("KEY", {"KEY": ""}) is None
    with pytest.raises(ConfigurationError, match="KEY and KEY_FILE are both set"):
        read_environment("KEY", {"KEY": "direct", "KEY_FILE": str(file)})
    with pytest.raises(ConfigurationError, match="that KEY_FILE names cannot be read"):
        read_environment("KEY", {"KEY_FILE": str(tmp_path / "missing")})
    file.write_bytes(b"\xff")
    with pytest.raises(ConfigurationError, match="not a UTF-8 text file"):
        read_environment("KEY", {"KEY_FILE": str(file)})
