"""A table of settings: each setting is declared once, and the rest is derived from it.

A settings class is a frozen dataclass whose fields are made with `setting`. The declaration holds
the default, the check, the environment variable and the text of the reference. The class, the types
of its options (`aztask.app.options`) and the reference page are made from it.

Rules
1. A field is checked by its declaration's check (see `aztask.support.checks`), unless it is
   optional and None.
2. Checks that concern several settings belong to the class, after `check_all`.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, Final

from aztask.errors import ConfigurationError, did_you_mean
from aztask.support.checks import Check
from aztask.support.display import mask, printable

_KEY: Final = "setting"
_UNIT: Final = "_seconds"


@dataclass(frozen=True, slots=True)
class Setting:
    """One row of the table.

    * `takes`: the option's type, in Python's notation.
    * `check`: see rule 1.
    * `text`: what the setting does, for the reference. A duration is in seconds.
    * `example`: a value, in Python's notation.
    * `variable`: the environment variable that sets it, "" for none.
    * `optional`: True if None is allowed.
    * `from_text`: makes the option's value from the variable's text; None keeps the text.
    """

    takes: str
    check: Check
    text: str
    example: str
    variable: str = ""
    optional: bool = False
    from_text: Callable[[str], Any] | None = None


def setting(
    default: Any,
    takes: str,
    check: Check,
    text: str,
    *,
    example: str,
    variable: str = "",
    from_text: Callable[[str], Any] | None = None,
) -> Any:
    """Declare a field of a settings class. The parameters are those of `Setting`."""
    row = Setting(takes, check, text, example, variable, default is None, from_text)
    return field(default=default, metadata={_KEY: row})


def inherited(kind: type[Any], name: str) -> Any:
    """Declare a field that overrides the setting `name` of another class; None keeps that one's."""
    row = table_of(kind)[name]
    kept = Setting(row.takes, row.check, row.text, row.example, optional=True)
    return field(default=None, metadata={_KEY: kept})


def table_of(kind: type[Any]) -> dict[str, Setting]:
    """{field name: setting}, in the order of declaration."""
    return {each.name: each.metadata[_KEY] for each in fields(kind) if _KEY in each.metadata}


def option_of(name: str) -> str:
    """The option of a field: the same name, for durations without ``_seconds``."""
    return name.removesuffix(_UNIT)


def check_all(settings: Any) -> None:
    """Check each field of a new settings object and store the value that its check returned."""
    for name, row in table_of(type(settings)).items():
        value = getattr(settings, name)
        if value is None and row.optional:
            continue
        object.__setattr__(settings, name, row.check(option_of(name), value))


def fields_of(kind: type[Any], options: Mapping[str, Any], what: str) -> dict[str, Any]:
    """{field name: value} from options, whose names may omit ``_seconds``.

    * `what`: the owner of the options, for errors.

    Raises ConfigurationError for an unknown option.
    """
    table = table_of(kind)
    short = {option_of(name): name for name in table}
    given: dict[str, Any] = {}
    for option, value in options.items():
        name = option if option in table else short.get(option)
        if name is None:
            hint = did_you_mean(option, [*short, *table])
            raise ConfigurationError(f"{what} has no option {printable(option)}.{hint}")
        if name in given:
            raise ConfigurationError(f"{what} is given {name} twice; keep one of them")
        given[name] = value
    return given


def options_of(kind: type[Any], environ: Mapping[str, str]) -> dict[str, Any]:
    """The options that environment variables give. Raises ConfigurationError."""
    found: dict[str, Any] = {}
    for name, row in table_of(kind).items():
        text = read_environment(row.variable, environ) if row.variable else None
        if text is not None:
            found[option_of(name)] = row.from_text(text) if row.from_text else text
    return found


def overruled_variables(
    kind: type[Any],
    given: Mapping[str, Any],
    places: Mapping[str, str],
    environ: Mapping[str, str] = os.environ,
) -> list[str]:
    """A line for each environment variable that an option of the code overrules.

    The code wins, which is easily overlooked where the variable was meant to choose the broker.

    * `given`: the options of an app; None stands for one that was not given.
    * `places`: the variables of options that are addresses, which are shown with their secrets
      masked.
    """
    rows = {option_of(name): row for name, row in table_of(kind).items() if row.variable}
    lines = []
    for name, value in given.items():
        row = rows.get(name)
        variable = places.get(name) or (row.variable if row else None)
        text = read_environment(variable, environ) if variable and value is not None else None
        if text is None or value in (text, row.from_text(text) if row and row.from_text else text):
            continue
        said = repr(mask(value)) if name in places and isinstance(value, str) else "..."
        lines.append(
            f"{variable} has no effect, because the code wins: it says App(..., {name}={said}); "
            "remove one of the two"
        )
    return lines


def read_environment(name: str, environ: Mapping[str, str] = os.environ) -> str | None:
    """The value of the variable `name`, or the content of the file that ``NAME_FILE`` names.

    One line break at the file's end is dropped, because mounted secrets often have one. None if
    neither variable is set. Raises ConfigurationError if both are, or the file cannot be read.
    """
    value, file = environ.get(name), environ.get(f"{name}_FILE")
    if value and file:
        raise ConfigurationError(f"{name} and {name}_FILE are both set; unset one of them")
    if not file:
        return value or None
    try:
        with Path(file).open(encoding="utf-8") as stream:
            return stream.read(65536).removesuffix("\n")
    except (OSError, ValueError) as error:
        why = error.strerror if isinstance(error, OSError) else "it is not a UTF-8 text file"
        raise ConfigurationError(
            f"the file {printable(file)} that {name}_FILE names cannot be read: {why}"
        ) from None
