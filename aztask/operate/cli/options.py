"""Option types and options that several commands share.

``aztask --help`` loads this module, so it imports no other part of aztask that is slow to import.
"""

from __future__ import annotations

import json
import math
import re
import sys
from collections.abc import Callable, Iterable
from datetime import datetime
from functools import wraps
from typing import Any, NoReturn, TypeVar

import click

from aztask.errors import ConfigurationError
from aztask.support.display import printable
from aztask.support.durations import LONGEST_SECONDS, parse_duration

Command = TypeVar("Command", bound=Callable[..., Any])

_APP_KEY = "aztask.app"
LONGEST_LEASE = 7 * 86400.0
LAST_PORT = 65535
_UNITS = ("", "k", "m", "g", "t")
_SIZE = re.compile(r"([0-9]{1,15}(?:\.[0-9]{1,6})?)\s*([kmgt]?)i?b?", re.IGNORECASE)


class Duration(click.ParamType[float]):
    """A duration: ``30s``, ``5m``, ``1h30m``, ``250ms`` or plain seconds."""

    name = "duration"

    def __init__(self, *, least: float = 0.0, most: float = LONGEST_SECONDS) -> None:
        self._least = least
        self._most = most

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> float:
        """The duration in seconds; fails with a usage error."""
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


class Moment(click.ParamType[datetime]):
    """A time: ``2026-11-01T02:00:00Z``; without an offset, in the command's time zone."""

    name = "time"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """The time; fails with a usage error."""
        if isinstance(value, datetime):
            return value
        try:
            return datetime.fromisoformat(value)
        except ValueError:
            self.fail(f"{value!r} is not a time; write 2026-11-01T02:00:00Z", param, ctx)


class PositiveRate(click.FloatRange):
    """A positive number per second; Click's own range accepts NaN."""

    name = "number"

    def __init__(self) -> None:
        super().__init__(min=0.001, max=1e6)

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """The rate per second; fails with a usage error."""
        rate = super().convert(value, param, ctx)
        if math.isnan(rate):
            self.fail(f"{printable(str(value), 40)} is not a number", param, ctx)
        return rate


class Size(click.ParamType[int]):
    """A size: ``64MB``, ``1.5GB``, ``200kB`` or plain bytes; a unit is 1,024 of the one below."""

    name = "size"

    def __init__(self, *, least: int = 0) -> None:
        self._least = least

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int:
        """The size in bytes; fails with a usage error."""
        if isinstance(value, int):
            return value
        found = _SIZE.fullmatch(str(value).strip())
        if found is None:
            self.fail(
                f"{printable(str(value), 40)} is not a size; write for example 64MB", param, ctx
            )
        size = int(float(found[1]) * 1024 ** _UNITS.index(found[2].lower()))
        if not self._least <= size < 2**53:
            self.fail(
                f"{printable(str(value), 40)} is not between {self._least} and 2^53 bytes",
                param,
                ctx,
            )
        return size


class JsonValue(click.ParamType[Any]):
    """A JSON value: a list, an object, or of any kind (``object``)."""

    def __init__(self, kind: type[list[Any]] | type[dict[str, Any]] | type[object]) -> None:
        self._kind = kind
        names: dict[type, str] = {list: "JSON list", dict: "JSON object"}
        self.name = names.get(kind, "JSON value")
        self._shown = '["a.png", 200]' if kind is list else '{"width": 200}'

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """The parsed value; NaN and Infinity, which JSON does not have, are refused."""
        if isinstance(value, self._kind) and not isinstance(value, str):
            return value
        given, instead = printable(value, 60), f"write for example '{self._shown}'"
        try:
            found = json.loads(value, parse_constant=_refuse, parse_float=_finite)
        except RecursionError:
            self.fail("it is nested too deeply", param, ctx)
        except ValueError as error:
            if isinstance(error, json.JSONDecodeError):
                # Each shell takes other quotes away before the program starts.
                escaped = self._shown.replace('"', '\\"')
                instead += f", in Windows PowerShell '{escaped}', in cmd.exe \"{escaped}\""
            self.fail(f"{given} is not valid JSON: {error}; {instead}", param, ctx)
        if not isinstance(found, self._kind):
            self.fail(f"{given} is not a {self.name}; {instead}", param, ctx)
        return found


class Text(click.ParamType[str]):
    """A name or an id: not empty, and text that every store can hold.

    new: it names something that is about to exist, so characters that cannot be printed are refused
    too. An id that you look up may hold them: another program may have chosen it.
    """

    name = "text"

    def __init__(self, *, new: bool = False) -> None:
        self._new = new

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> str:
        """The text; fails with a usage error."""
        text = str(value)
        if not text.strip():
            self.fail("it is empty; is a shell variable unset?", param, ctx)
        if "\0" in text or (not text.isascii() and _undecodable(text)):
            self.fail(f"{printable(text, 60)} is not valid text in UTF-8", param, ctx)
        if self._new and not text.isprintable():
            self.fail(f"{printable(text, 60)} holds characters that cannot be printed", param, ctx)
        return text


class Listen(click.ParamType[tuple[str, int]]):
    """An address to listen on: ``HOST:PORT``, ``[::1]:PORT``, or ``:PORT`` for all addresses."""

    name = "host:port"

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> tuple[str, int]:
        """Host and port; fails with a usage error."""
        if isinstance(value, tuple):
            return value
        host, colon, port = str(value).rpartition(":")
        if host.startswith("[") and host.endswith("]"):
            host = host[1:-1]
        elif ":" in host:
            colon = ""
        if not colon or not (port.isascii() and port.isdigit()) or int(port) > LAST_PORT:
            self.fail(
                f"{printable(str(value), 60)} is not an address; write HOST:PORT, for example "
                "127.0.0.1:9465",
                param,
                ctx,
            )
        return host or "0.0.0.0", int(port)  # noqa: S104  # ":9465" asks for all of them


class NameList(click.ParamType[tuple[str, ...]]):
    """Names that are separated by commas."""

    name = "names"

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> tuple[str, ...]:
        """The names, each once, in order."""
        if isinstance(value, tuple):
            return value
        names = tuple(dict.fromkeys(name.strip() for name in value.split(",")))
        if not all(names):
            self.fail(f"{printable(value, 60)} has an empty name; write a,b", param, ctx)
        return names


class WeightedNames(NameList):
    """Names of queues that are separated by commas, each with a weight or without: ``a:4,b``."""

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> tuple[str, ...]:
        """The names as they were given, with their weights; `split_weights` splits them."""
        names = super().convert(value, param, ctx)
        for name in names:
            queue, colon, weight = name.rpartition(":")
            if colon and not (queue and weight.isascii() and weight.isdigit() and len(weight) < 4):
                self.fail(f"{printable(name, 60)} has a wrong weight; write QUEUE:4", param, ctx)
        return names


def split_weights(names: Iterable[str]) -> tuple[tuple[str, ...], dict[str, int]]:
    """(queues, {queue: weight}) of checked `WeightedNames`; a later weight replaces an earlier."""
    weights: dict[str, int] = {}
    queues: list[str] = []
    for name in names:
        queue, colon, weight = name.rpartition(":")
        queues.append(queue if colon else name)
        if colon:
            weights[queue] = int(weight)
    return tuple(dict.fromkeys(queues)), weights


def _undecodable(text: str) -> bool:
    """Whether it holds lone surrogates, which stand for bytes that were not UTF-8."""
    return any("\ud800" <= character <= "\udfff" for character in text)


def queues_option(text: str, *, weighted: bool = False) -> Callable[[Command], Command]:
    """Add ``-Q a,b``, which may be repeated: `all_names` joins the values.

    text: its help. weighted: whether the names may have weights.
    """
    kind = WeightedNames() if weighted else NameList()
    option: Callable[[Command], Command] = click.option(
        "-Q", "--queues", type=kind, multiple=True, help=text
    )
    return option


def all_names(given: Iterable[tuple[str, ...]]) -> tuple[str, ...]:
    """The names of a repeatable option, each once, in order."""
    return tuple(dict.fromkeys(name for names in given for name in names))


def _finite(number: str) -> float:
    value = float(number)
    if math.isinf(value):
        raise ValueError(f"{printable(number, 40)} is larger than any float")
    return value


def _refuse(constant: str) -> NoReturn:
    raise ValueError(f"{constant} is not JSON")


def app_option(command: Command) -> Command:
    """Add ``-A``, before the command or after it; the last one wins."""
    option: Callable[[Command], Command] = click.option(
        "-A",
        "--app",
        metavar="MODULE:APP",
        expose_value=False,
        callback=_remember_app,
        help="Use this app, for example shop.tasks:app (or set AZTASK_APP).",
    )
    return option(command)


def json_option(command: Callable[..., None]) -> Callable[..., None]:
    """Add ``--json``, which the command gets as ``as_json``."""

    # Click names the environment variable after the parameter: AZTASK_TASKS_JSON.
    @click.option("--json", is_flag=True, help="Print JSON, one object per line.")
    @wraps(command)
    def renamed(*args: Any, json: bool, **kwargs: Any) -> None:
        command(*args, as_json=json, **kwargs)

    return renamed


def chosen_app(ctx: click.Context) -> str | None:
    """The app that ``-A`` or AZTASK_APP names, None without either."""
    spec: str | None = ctx.find_root().meta.get(_APP_KEY)
    return spec


def _remember_app(ctx: click.Context, param: click.Parameter, value: str | None) -> None:
    if value is not None:
        ctx.find_root().meta[_APP_KEY] = value


# -- asking before something is done that cannot be undone ---------------------------------


def dry_run_option(command: Command) -> Command:
    """Add ``--dry-run``, which only says what would be done."""
    option: Callable[[Command], Command] = click.option(
        "--dry-run", is_flag=True, help="Only say what would be done."
    )
    return option(command)


def yes_option(command: Command) -> Command:
    """Add ``--yes``, which answers the question in advance."""
    option: Callable[[Command], Command] = click.option(
        "-y", "--yes", is_flag=True, help="Do not ask for confirmation."
    )
    return option(command)


def confirm(what: str, *, dry_run: bool, yes: bool) -> bool:
    """Ask on a terminal whether to do `what`; elsewhere a missing --yes is a usage error."""
    if dry_run:
        click.echo(f"would {what}")
        return False
    if yes:
        return True
    if sys.stdin is None or not sys.stdin.isatty():
        raise click.UsageError(
            f"this would {what}; add --yes to do it, or --dry-run to only see it"
        )
    click.confirm(f"{what}?", abort=True, err=True)
    return True
