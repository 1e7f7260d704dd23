"""The key of a call: a digest of the task's name and of its arguments, bound to its signature.

So ``add(1, 2)``, ``add(1, b=2)`` and ``add(b=2, a=1)`` have one key, and a default that is written
out changes nothing.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from hashlib import sha256
from typing import Any, Protocol

from aztask.message.codec import Codec
from aztask.uniqueness.rules import UniqueRules


class UniqueTask(Protocol):
    """The part of a `Task` that the key needs."""

    name: str
    signature: inspect.Signature
    with_context: bool


def key_of(
    codec: Codec,
    task: UniqueTask,
    rules: UniqueRules,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
) -> str:
    """The key of a call. Raises EncodeError for arguments that no message can hold, and whatever
    the function for the key raises.
    """
    value = _bound(task, args, kwargs) if rules.key is None else _made(rules.key, args, kwargs)
    digest = sha256(codec.encode_value(_in_order(value))).hexdigest()
    return f"{task.name}:{digest[:40]}"


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
