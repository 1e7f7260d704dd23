"""The options of unique tasks, checked, and the key of a call."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final, Literal, Protocol, TypeAlias, get_args

from aztask.errors import ConfigurationError, EncodeError
from aztask.message.codec import Codec
from aztask.taskoptions import choice, positive
from aztask.typed.conversion import Conversion, as_plain

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


# -- keys ------------------------------------------------------------------------------------
#
# The key of a call: the task's name and a digest of its arguments, bound to its signature. With
# encryption the digest is keyed.
#
# So ``add(1, 2)``, ``add(1, b=2)`` and ``add(b=2, a=1)`` have one key, and a default that is
# written out changes nothing.


class UniqueTask(Protocol):
    """The part of a `Task` that the key needs."""

    name: str
    signature: inspect.Signature
    with_context: bool

    @property
    def conversion(self) -> Conversion:
        """Reads its arguments as a function for the key gets them."""
        ...


def key_of(
    codec: Codec,
    task: UniqueTask,
    rules: UniqueRules,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> str:
    """The key of a call. Raises EncodeError for arguments that no message can hold, and whatever
    the function for the key raises.

    A function for the key gets the arguments as the task's function gets them, in the sender and in
    a worker, so that both find one key.

    * `args`, `kwargs`: plain, as the message holds them.
    """
    if rules.key is None:
        value = _bound(task, args, kwargs)
    else:
        value = _made(rules.key, *task.conversion.peek(args, kwargs))
    try:
        data = codec.encode_value(_in_order(value))
    except EncodeError:  # a default, or the function's value, which is no plain data
        data = codec.encode_value(_in_order(as_plain(value)))
    return f"{task.name}:{codec.digests.of(data)}"


def task_of(key: str) -> str:
    """The name of the task that a key belongs to."""
    return key.rpartition(":")[0]


def _made(key: Callable[..., object], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> object:
    return key(*args, **kwargs)


def _bound(task: UniqueTask, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> object:
    context = (None,) if task.with_context else ()
    bound = task.signature.bind(*context, *args, **kwargs)
    bound.apply_defaults()
    return [[name, value] for name, value in bound.arguments.items()][len(context) :]


def _in_order(value: object) -> object:
    """The value with maps as sorted lists, since equal maps may have been filled in any order."""
    if isinstance(value, Mapping):
        pairs = [[_in_order(key), _in_order(each)] for key, each in value.items()]
        return ["map", sorted(pairs, key=repr)]
    if isinstance(value, list | tuple):
        return [_in_order(each) for each in value]
    return value
