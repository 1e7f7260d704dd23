"""The options of unique tasks, checked."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final, Literal, TypeAlias, get_args

from aztask.errors import ConfigurationError
from aztask.taskoptions import choice, positive

OnConflict: TypeAlias = Literal["return", "drop", "raise", "replace"]
ON_CONFLICT: Final[tuple[str, ...]] = get_args(OnConflict)
ARGUMENTS: Final = "arguments"
STARTED: Final = "started"
FINISHED: Final = "finished"
QUIET: Final = "quiet"
LIFE_SECONDS: Final = 86400.0
_NEEDS: Final = ("until", "on_conflict", "unique_life")


@dataclass(frozen=True, slots=True)
class UniqueRules:
    """How a task is unique.

    * `key`: makes a key of the call's arguments; None: all arguments are the key.
    * `until`: "started", "finished", "quiet" for a debounced task, whose key is held until no call
      came for `seconds`, or "" for `seconds` after the send.
    * `on_conflict`: what a call does while another task holds the key.
    * `life`: seconds after which a key is free, whatever happened.
    """

    key: Callable[..., object] | None
    until: str
    seconds: float
    on_conflict: str
    life: float


def unique_rules(options: Mapping[str, Any], where: str) -> UniqueRules | None:
    """The rules in a task's options; None if it is not unique. Raises ConfigurationError.

    * `where`: the task, for the errors.
    """
    unique = options.get("unique")
    if options.get("debounce") is not None:
        return _debounced(options, where)
    if options.get("throttle") is not None:
        return _throttled(options, where)
    if unique is None:
        for name in _NEEDS:
            if name in options:
                raise ConfigurationError(
                    f'{where}: {name} needs unique="arguments" or unique=a function that makes the '
                    "key"
                )
        return None
    life = positive(options.get("unique_life", LIFE_SECONDS), f"{where}: unique_life")
    until, seconds = options.get("until", FINISHED), 0.0
    if until not in (STARTED, FINISHED):
        if isinstance(until, str):
            choice(until, (STARTED, FINISHED), f"{where}: until")
        until, seconds = "", positive(until, f"{where}: until")
        life = seconds
    conflict = choice(options.get("on_conflict", "return"), ON_CONFLICT, f"{where}: on_conflict")
    return UniqueRules(_key(unique, where), until, seconds, conflict, life)


def _throttled(options: Mapping[str, Any], where: str) -> UniqueRules:
    """``throttle=60`` is ``unique=..., until=60, on_conflict="drop"``."""
    for name in _NEEDS:
        if name in options:
            raise ConfigurationError(f"{where}: throttle and {name} exclude each other; give one")
    seconds = positive(options["throttle"], f"{where}: throttle")
    key = _key(options.get("unique", ARGUMENTS), where)
    return UniqueRules(key, "", seconds, "drop", seconds)


def _debounced(options: Mapping[str, Any], where: str) -> UniqueRules:
    """``debounce=5``: the last call of each key is sent, when none came for 5 seconds."""
    for name in ("until", "on_conflict", "throttle"):
        if name in options:
            raise ConfigurationError(f"{where}: debounce and {name} exclude each other; give one")
    seconds = positive(options["debounce"], f"{where}: debounce")
    life = positive(options.get("unique_life", LIFE_SECONDS), f"{where}: unique_life")
    if life < seconds:
        raise ConfigurationError(f"{where}: unique_life must be at least as long as debounce")
    if "unique" not in options:
        raise ConfigurationError(
            f"{where}: debounce needs unique=a function that makes the key, because the calls of "
            'one key have different arguments; or unique="arguments"'
        )
    return UniqueRules(_key(options["unique"], where), QUIET, seconds, "return", life)


def _key(unique: object, where: str) -> Callable[..., object] | None:
    if unique == ARGUMENTS:
        return None
    if not callable(unique):
        raise ConfigurationError(
            f'{where}: unique takes "arguments" or a function that makes the key of the arguments, '
            f"such as lambda order, **_: order, not {unique!r:.60}"
        )
    return unique
