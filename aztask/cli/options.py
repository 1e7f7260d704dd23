"""Option types and options that several commands share. Light: ``aztask --help`` loads this."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable
from functools import wraps
from typing import Any, NoReturn, TypeVar

import click

from aztask.errors import ConfigurationError
from aztask.support.durations import LONGEST_SECONDS, parse_duration
from aztask.support.masking import printable

Command = TypeVar("Command", bound=Callable[..., Any])

_APP_KEY = "aztask.app"
LONGEST_LEASE = 7 * 86400.0


class Duration(click.ParamType[float]):
    """``30s``, ``5m``, ``1h30m``, ``250ms`` or plain seconds, as seconds."""

    name = "duration"

    def __init__(self, *, least: float = 0.0, most: float = LONGEST_SECONDS) -> None:
        self._least = least
        self._most = most

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> float:
        """Seconds as a float."""
        if isinstance(value, int | float):
            return float(value)
        try:
            seconds = parse_duration(value)
        except ConfigurationError as error:
            self.fail(str(error), param, ctx)
        if not self._least <= seconds <= self._most:
            self.fail(
                f"{printable(value, 40)} is not between {self._least:g} and {self._most:g} seconds",
                param,
                ctx,
            )
        return seconds


class Rate(click.FloatRange):
    """A number a second above 0; Click's own range lets NaN through."""

    name = "number"

    def __init__(self) -> None:
        super().__init__(min=0.001, max=1e6)

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """The number as a float."""
        rate = super().convert(value, param, ctx)
        if math.isnan(rate):
            self.fail(f"{printable(str(value), 40)} is not a number", param, ctx)
        return rate


class JsonValue(click.ParamType[Any]):
    """A JSON value of one kind: a list or an object."""

    def __init__(self, kind: type[list[Any]] | type[dict[str, Any]]) -> None:
        self._kind = kind
        self.name = "JSON list" if kind is list else "JSON object"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """The value; NaN and Infinity, which JSON does not have, are refused."""
        if isinstance(value, self._kind):
            return value
        try:
            found = json.loads(value, parse_constant=_refuse)
        except RecursionError:
            self.fail("it is nested too deeply", param, ctx)
        except ValueError as error:
            self.fail(f"{printable(value, 60)} is not JSON: {error}", param, ctx)
        if not isinstance(found, self._kind):
            self.fail(f"{printable(value, 60)} is not a {self.name}", param, ctx)
        return found


class NameList(click.ParamType[tuple[str, ...]]):
    """Names with commas between them."""

    name = "names"

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> tuple[str, ...]:
        """The names, each once, in order."""
        if isinstance(value, tuple):
            return value
        names = tuple(dict.fromkeys(value.split(",")))
        if not all(names):
            self.fail(f"{printable(value, 60)} holds an empty name; write a,b", param, ctx)
        return names


def queues_option(text: str) -> Callable[[Command], Command]:
    """``-Q a,b``, several times: `all_names` joins them. text: the help."""
    option: Callable[[Command], Command] = click.option(
        "-Q", "--queues", type=NameList(), multiple=True, help=text
    )
    return option


def all_names(given: Iterable[tuple[str, ...]]) -> tuple[str, ...]:
    """The names of an option that may be given several times, each once, in order."""
    return tuple(dict.fromkeys(name for names in given for name in names))


def _refuse(constant: str) -> NoReturn:
    raise ValueError(f"{constant} is not JSON")


def app_option(command: Command) -> Command:
    """``-A``, before the command or after it; the later one wins."""
    option: Callable[[Command], Command] = click.option(
        "-A",
        "--app",
        metavar="MODULE:APP",
        expose_value=False,
        callback=_remember_app,
        help="The app, for example shop.tasks:app (or the environment variable AZTASK_APP).",
    )
    return option(command)


def json_option(command: Callable[..., None]) -> Callable[..., None]:
    """``--json``, on every reading command, which gets it as ``as_json``."""

    # Click names the environment variable after the parameter: AZTASK_TASKS_JSON.
    @click.option("--json", is_flag=True, help="Print JSON, one object per line.")
    @wraps(command)
    def renamed(*args: Any, json: bool, **kwargs: Any) -> None:
        command(*args, as_json=json, **kwargs)

    return renamed


def chosen_app(ctx: click.Context) -> str | None:
    """What ``-A`` or AZTASK_APP said, None without either."""
    spec: str | None = ctx.find_root().meta.get(_APP_KEY)
    return spec


def _remember_app(ctx: click.Context, param: click.Parameter, value: str | None) -> None:
    if value is not None:
        ctx.find_root().meta[_APP_KEY] = value
