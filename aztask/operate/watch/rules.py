"""The file of rules: what is watched, and where a notice goes.

Rules
1. An address of a webhook is a secret, so the file only says where it is: ``env:NAME`` or
   ``file:PATH``. It is shown nowhere, and masked in every text.
2. A key or a value that is unknown is an error that names it: a rule that never fires because of a
   wrong letter would be worse.
"""

from __future__ import annotations

import os
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from ipaddress import ip_address
from pathlib import Path
from typing import Any, Final
from urllib.parse import urlsplit

from aztask.errors import ConfigurationError, did_you_mean
from aztask.support.display import Secret, printable
from aztask.support.durations import parse_duration

FORMS: Final = ("json", "slack", "teams")
SHORTEST_INTERVAL: Final = 1.0
LONGEST_NAME: Final = 100
_WILD: Final = frozenset("*?[")


@dataclass(frozen=True, slots=True)
class RuleKind:
    """A kind of rule.

    * `names`: the key with the names that it is about, such as ``queue``.
    * `above`: what its limit is, ``count`` or ``duration``; "" if it has none.
    """

    names: str
    above: str = ""


KINDS: Final[Mapping[str, RuleKind]] = {
    "backlog": RuleKind("queue", "count"),
    "oldest": RuleKind("queue", "duration"),
    "failures": RuleKind("queue"),
    "schedule": RuleKind("schedule"),
    "worker": RuleKind("worker"),
    "breaker": RuleKind("task"),
}


@dataclass(frozen=True, slots=True)
class WatchRule:
    """One rule.

    * `name`: also names its state in the result store; watchers with one name share that.
    * `when`: its kind, one of `KINDS`.
    * `names`: what it is about, as patterns of the shell; ``*`` for all.
    * `above`: messages, or seconds; 0 for a kind without a limit.
    * `hold`: for how long it must hold before it is sent, and be gone before its end is; seconds.
    * `to`: the names of its webhooks.
    """

    name: str
    when: str
    names: tuple[str, ...]
    above: float
    hold: float
    to: tuple[str, ...]

    def covers(self, name: str) -> bool:
        """Whether the rule is about this queue, schedule, worker or task."""
        return any(fnmatchcase(name, each) for each in self.names)

    @property
    def exact(self) -> tuple[str, ...] | None:
        """The names, if all of them are written in full; else None."""
        return None if any(_WILD & set(each) for each in self.names) else self.names


@dataclass(frozen=True, slots=True)
class Webhook:
    """Where notices go. form: one of `FORMS`."""

    name: str
    form: str
    url: Secret


@dataclass(frozen=True, slots=True)
class RuleFile:
    """What a file of rules says.

    * `every`: seconds between two looks. `page`: the address of the dashboard, for links; or "".
    * `heartbeat`: is asked for after each look that was complete; None without one.
    """

    rules: Sequence[WatchRule]
    webhooks: Mapping[str, Webhook]
    every: float
    page: str
    heartbeat: Secret | None


def read_rules(path: Path) -> RuleFile:
    """Read a file of rules, and the secrets that it names. Raises ConfigurationError."""
    try:
        data = tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigurationError(f"the rules {path} cannot be read: {error}") from None
    except tomllib.TOMLDecodeError as error:
        raise ConfigurationError(f"the rules {path} are not valid TOML: {error}") from None
    try:
        return _file(data)
    except ConfigurationError as error:
        raise ConfigurationError(f"{path}: {error}") from None


def _file(data: Mapping[str, Any]) -> RuleFile:
    _only(data, ("every", "page", "heartbeat", "webhooks", "rules"), "the file")
    hooks = {
        name: _webhook(name, _table(each, f"webhooks.{name}"))
        for name, each in _table(data.get("webhooks", {}), "webhooks").items()
    }
    if not hooks:
        raise ConfigurationError("it names no webhook: add [webhooks.NAME] with form and url")
    given = data.get("rules", [])
    if not isinstance(given, list) or not given:
        raise ConfigurationError("it has no rule: add [[rules]] with name and when")
    rules = [_rule(_table(each, "each of [[rules]]"), hooks) for each in given]
    names = [each.name for each in rules]
    for name in names:
        if names.count(name) > 1:
            raise ConfigurationError(f"two rules have the name {printable(name, 60)}")
    every = _seconds(data.get("every", "30s"), "every")
    if every < SHORTEST_INTERVAL:
        raise ConfigurationError("every is at least 1s")
    page = data.get("page", "")
    if page and urlsplit(_text(page, "page")).scheme not in ("http", "https"):
        raise ConfigurationError("page is the address of the dashboard: https://...")
    beat = data.get("heartbeat")
    secret = None if beat is None else _secret(_text(beat, "heartbeat"), "heartbeat")
    return RuleFile(rules, hooks, every, str(page).rstrip("/"), secret)


def _webhook(name: str, given: Mapping[str, Any]) -> Webhook:
    where = f"webhooks.{name}"
    _only(given, ("form", "url"), where)
    form = _text(given.get("form", "json"), f"{where}.form")
    if form not in FORMS:
        raise ConfigurationError(
            f"{where}.form is one of {', '.join(FORMS)}, not {printable(form, 40)}"
        )
    if "url" not in given:
        raise ConfigurationError(f'{where} needs url = "env:NAME" or url = "file:PATH"')
    return Webhook(name, form, _secret(_text(given["url"], f"{where}.url"), f"{where}.url"))


def _rule(given: Mapping[str, Any], hooks: Mapping[str, Webhook]) -> WatchRule:
    name = _text(given.get("name", ""), "the name of a rule")
    if not name.strip() or len(name) > LONGEST_NAME or not name.isprintable():
        raise ConfigurationError(f"a rule needs a name of 1 to {LONGEST_NAME} characters")
    where = f"rule {printable(name, 60)}"
    when = _text(given.get("when", ""), f"{where}: when")
    if when not in KINDS:
        raise ConfigurationError(
            f"{where}: when is one of {', '.join(KINDS)}.{did_you_mean(when, list(KINDS))}"
        )
    kind = KINDS[when]
    _only(
        given, ("name", "when", "for", "to", kind.names, *(["above"] if kind.above else [])), where
    )
    to = _names(given.get("to", list(hooks)), f"{where}: to")
    for each in to:
        if each not in hooks:
            raise ConfigurationError(
                f"{where}: there is no webhook {printable(each, 40)}."
                f"{did_you_mean(each, list(hooks))}"
            )
    names = _names(given.get(kind.names, "*"), f"{where}: {kind.names}")
    hold = _seconds(given.get("for", "0s"), f"{where}: for")
    return WatchRule(name, when, names, _above(given, kind, where), hold, to)


def _above(given: Mapping[str, Any], kind: RuleKind, where: str) -> float:
    if not kind.above:
        return 0.0
    if "above" not in given:
        example = "above = 1000" if kind.above == "count" else 'above = "15m"'
        raise ConfigurationError(f"{where} needs a limit, such as {example}")
    value = given["above"]
    if kind.above == "duration":
        return _seconds(value, f"{where}: above")
    if isinstance(value, bool) or not isinstance(value, int) or value < 0:
        raise ConfigurationError(f"{where}: above is a number of messages")
    return float(value)


# -- values ----------------------------------------------------------------------------------


def _only(given: Mapping[str, Any], known: Sequence[str], where: str) -> None:
    for name in given:
        if name not in known:
            hint = did_you_mean(name, list(known))
            raise ConfigurationError(f"{where} has no setting {printable(name, 40)}.{hint}")


def _table(value: Any, where: str) -> Mapping[str, Any]:
    if not isinstance(value, dict):
        raise ConfigurationError(f"{where} is a table of TOML")
    return value


def _text(value: Any, where: str) -> str:
    if not isinstance(value, str):
        raise ConfigurationError(f"{where} is a text")
    return value


def _names(value: Any, where: str) -> tuple[str, ...]:
    found = [value] if isinstance(value, str) else value
    texts = isinstance(found, list) and all(isinstance(each, str) and each for each in found)
    if not texts or not found:
        raise ConfigurationError(f"{where} is a name or a list of names")
    return tuple(dict.fromkeys(found))


def _seconds(value: Any, where: str) -> float:
    if isinstance(value, int | float) and not isinstance(value, bool):
        value = str(value)
    try:
        return parse_duration(_text(value, where))
    except ConfigurationError as error:
        raise ConfigurationError(f"{where}: {error}") from None


def _secret(place: str, where: str) -> Secret:
    """The address that an environment variable or a file holds."""
    kind, _, name = place.partition(":")
    if kind not in ("env", "file") or not name:
        # Not with the value: it may be the address itself.
        raise ConfigurationError(
            f'{where} says where the address is, "env:NAME" or "file:PATH": the address itself is a'
            " secret"
        )
    if kind == "env":
        text = os.environ.get(name, "")
        if not text.strip():
            raise ConfigurationError(f"{where}: the variable {printable(name, 60)} is not set")
    else:
        try:
            text = Path(name).read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigurationError(f"{where}: {name} cannot be read: {error}") from None
    return _checked(text.strip(), where)


def _checked(text: str, where: str) -> Secret:
    secret = Secret(text)  # first, so that no error shows it
    try:
        parts = urlsplit(text)
        host, port = parts.hostname or "", parts.port
    except ValueError:
        host, port = "", None
    plain = text.isascii() and text.isprintable() and " " not in text
    if not plain or not host or port == 0 or parts.scheme not in ("https", "http"):
        raise ConfigurationError(f"{where} is no address: it begins with https://")
    if parts.scheme == "http" and not _here(host):
        raise ConfigurationError(
            f"{where} begins with http://, which shows the secret to the network; use https://"
        )
    Secret(parts.path)  # a library's error may name the path alone
    return secret


def _here(host: str) -> bool:
    try:
        return ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
