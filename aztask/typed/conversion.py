"""The converter of one task: its arguments and its result, by the names of its parameters.

It also knows which of them are secret: ``card: Annotated[str, Secret]``.

1. The mark may be anywhere in an annotation: in a union, in a list, in a field of a class. What is
   masked is the whole argument.
2. Where aztask shows the arguments or the result of a task that it knows, those are ``****``.
3. While a run is read, goes on and is answered, `aztask.support.display.mask` replaces the texts in
   its secret arguments (`texts_in`): in the error that is recorded, in its traceback, and in what
   the pool process logs.
4. Nothing is encrypted: the queue and the result store hold the values.
"""

from __future__ import annotations

import inspect
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Final

from aztask.errors import DecodeError, EncodeError
from aztask.message.payload import StoredValue
from aztask.support.display import MASK
from aztask.typed.annotations import Shapes, hints_of, is_secret, names_of
from aztask.typed.shapes import (
    ANY,
    Findings,
    Misfit,
    Place,
    Refused,
    Shape,
    place_text,
    plain_of,
    raised,
)

logger = logging.getLogger(__name__)

Arguments = tuple[tuple[Any, ...], dict[str, Any]]

RESULT: Final = "the result"
SHORTEST: Final = 3
"""Characters of the shortest text that is masked in other texts: "no" is in half of them."""
SIGNATURES: Final = 64
"""Types of calls that a task remembers. A program that has more of them looks at each call."""


class Conversion:
    """Converts the arguments and the result of a task. Any number of threads may share one.

    * `settled`: the types of calls that need no look (`call_types`): each argument is of exactly a
      type that fits, and nothing in it would change.
    * `secret`, `secret_result`: an argument, or the result, is marked as secret, see
      `aztask.typed.secrets`.
    """

    def __init__(
        self,
        name: str,
        function: Callable[..., Any],
        signature: inspect.Signature,
        *,
        with_context: bool,
        strict: bool,
        model: Any = None,
    ) -> None:
        """A function's converter.

        * `strict`: refuse what does not fit, see `aztask.typed`.
        * `model`: what the first argument is, whatever its annotation says; reading is strict then.
        """
        self._name, self.strict = name, strict
        self._reads_strictly = strict or model is not None
        hints, names, shapes = hints_of(function), names_of(function), Shapes()
        self._places: list[tuple[str, Shape]] = []
        self._names: dict[str, Shape] = {}
        self._more: tuple[str, Shape] | None = None
        self._others: Shape = ANY
        parameters = list(signature.parameters.values())[int(with_context) :]
        if model is not None and parameters:
            hints[parameters[0].name] = model
        self._secret = {each.name for each in parameters if is_secret(hints.get(each.name))}
        self._rest_is_secret, self.secret = False, bool(self._secret)
        self.secret_result = is_secret(hints.get("return"))
        for each in parameters:
            shape = shapes.of(hints.get(each.name, Any), names)
            if each.kind is each.VAR_POSITIONAL:
                self._more = (each.name, shape)
            elif each.kind is each.VAR_KEYWORD:
                self._others, self._rest_is_secret = shape, each.name in self._secret
            else:
                if each.kind is not each.KEYWORD_ONLY:
                    self._places.append((each.name, shape))
                if each.kind is not each.POSITIONAL_ONLY:
                    self._names[each.name] = shape
        self._result = shapes.of(hints.get("return", Any), names)
        self._warned = self._warned_of_result = False
        self.settled: set[tuple[Any, ...]] = set()

    # -- arguments ---------------------------------------------------------------------------

    def written(
        self,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        *,
        given: int = 0,
        by_name: bool = False,
    ) -> Arguments | None:
        """The arguments as plain data; None if they are plain already.

        * `given`: how many positional arguments come before `args`, from another task.
        * `by_name`: plain data that can be read as the annotated type fits, too: such calls may
          come from JSON.

        Raises EncodeError for one that cannot be written, or that `strict` refuses.
        """
        if self._is_settled(args, kwargs, given):
            return None
        found = Findings(strict=self.strict)
        write = _write_by_name if by_name else _write
        try:
            plain = self._each(write, args, kwargs, found, given)
        except (Misfit, Refused) as error:
            raise EncodeError(f"task {self._name}: {error}") from None
        if found.first:
            self._warn(found.first, "it is sent as it is")
        return None if _same(plain, args, kwargs) else plain

    def read(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Arguments:
        """Plain arguments as the function takes them, for a run. Raises DecodeError if strict."""
        if self.strict is self._reads_strictly and self._is_settled(args, kwargs):
            return args, kwargs
        found = Findings(strict=self._reads_strictly)
        try:
            made = self._each(_read, args, kwargs, found)
        except Misfit as error:
            raise DecodeError(f"task {self._name}: {error}") from None
        if found.first:
            self._warn(found.first, "the task gets it as it is")
        return made

    def peek(self, args: tuple[Any, ...], kwargs: dict[str, Any], *, given: int = 0) -> Arguments:
        """`read` for functions that look at a call before its run: it never raises, nor warns."""
        return self._each(_read, args, kwargs, Findings(strict=False), given)

    def parsed(self, data: bytes) -> Any:
        """JSON, as `read` takes it for the first argument.

        Raises ValueError and RecursionError for what is no JSON, and DecodeError.
        """
        name, shape = self._places[0] if self._places else ("the body", ANY)
        try:
            return shape.parse(data, name)
        except Misfit as error:
            raise DecodeError(f"task {self._name}: {error}") from None

    def masked(
        self, args: tuple[Any, ...], kwargs: dict[str, Any], *, given: Sequence[int] = (0,)
    ) -> Arguments | None:
        """The arguments with those that are secret masked; None if none is.

        * `given`: how many positional arguments may come before `args`, from another task.
        """
        if not self._secret:
            return None
        hidden: list[bool] = [False] * (len(args) + len(kwargs))
        for number in given:
            places = [place for place, _, _ in self._shaped(args, kwargs, number)]
            hidden = [a or self._hides(b) for a, b in zip(hidden, places, strict=True)]
        if not any(hidden):
            return None
        shown = [MASK if a else b for a, b in zip(hidden, (*args, *kwargs.values()), strict=True)]
        return tuple(shown[: len(args)]), dict(zip(kwargs, shown[len(args) :], strict=True))

    def secret_texts(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[str]:
        """The texts in plain arguments that are secret."""
        if not self._secret:
            return []
        shaped = self._shaped(args, kwargs, 0)
        return [
            text for place, _, value in shaped if self._hides(place) for text in texts_in(value)
        ]

    def _hides(self, place: Place) -> bool:
        name = place if isinstance(place, str) else place[0]
        return name in self._secret or (self._rest_is_secret and name not in self._names)

    def why_not(self, parameter: str, value: Any, *, by_type: bool = False) -> str:
        """Why a plain value does not fit a parameter; "" if it does, or is not checked.

        Names the parameter. For those who know the types of many values before they send them.

        * `by_type`: the value is a sample of its type, see `Findings`.
        """
        try:
            _read(
                self._shape_of(parameter), value, parameter, Findings(strict=True, by_type=by_type)
            )
        except Misfit as error:
            return str(error)
        return ""

    def annotation_of(self, parameter: str) -> str | None:
        """The annotation of a parameter, as errors name it; None if nothing is checked by it."""
        shape = self._shape_of(parameter)
        return None if shape.unchecked else shape.name

    def _shape_of(self, parameter: str) -> Shape:
        return self._names.get(parameter, self._others)

    def _is_settled(self, args: tuple[Any, ...], kwargs: Mapping[str, Any], given: int = 0) -> bool:
        """Whether a call needs no look: it is neither converted nor warned of.

        Each argument is of exactly a type that fits, and holds nothing that would change. Strict
        tasks look into lists and dicts.
        """
        if not given and call_types(args, kwargs) in self.settled:
            return True
        shaped = self._shaped(args, kwargs, given)
        if not all(self._settles(shape, type(value)) for _, shape, value in shaped):
            return False
        if not given and len(self.settled) < SIGNATURES:
            self.settled.add(call_types(args, kwargs))
        return True

    def _settles(self, shape: Shape, kind: type) -> bool:
        if shape.unchecked or (self._warned and shape.plain and not self.strict):
            return True
        return kind in shape.settled and not (self.strict and issubclass(kind, _CONTAINERS))

    def _shaped(
        self, args: tuple[Any, ...], kwargs: Mapping[str, Any], given: int
    ) -> list[tuple[Place, Shape, Any]]:
        """(place, shape, value) of each argument, in their order."""
        found: list[tuple[Place, Shape, Any]] = []
        for number, value in enumerate(args, given):
            if number < len(self._places):
                found.append((*self._places[number], value))
            else:
                name, shape = self._more or ("args", ANY)
                found.append(((name, number - len(self._places)), shape, value))
        for name, value in kwargs.items():
            found.append((name, self._names.get(name, self._others), value))
        return found

    def _each(
        self,
        convert: Callable[[Shape, Any, Place, Findings], Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        found: Findings,
        given: int = 0,
    ) -> Arguments:
        shaped = self._shaped(args, kwargs, given)
        values = [convert(shape, value, place, found) for place, shape, value in shaped]
        names = dict(zip(kwargs, values[len(args) :], strict=True)) if kwargs else kwargs
        return tuple(values[: len(args)]), names

    def _warn(self, text: str, follows: str) -> None:
        if not self._warned:
            self._warned = True
            logger.warning(
                "task %s: %s; %s. This is said once; strict=True refuses such calls",
                self._name, text, follows,
            )  # fmt: skip

    # -- the result --------------------------------------------------------------------------

    def written_result(self, value: Any) -> Any:
        """What a task returned, as plain data. Raises EncodeError, and nothing else.

        The task has run: an error of another kind could be retried, and run it again.
        """
        if type(value) in self._result.settled or self._result.unchecked:
            return value
        found = Findings(strict=False)
        try:
            plain = _write(self._result, value, RESULT, found)
        except (Misfit, Refused) as error:
            raise EncodeError(f"task {self._name}: {error}") from None
        if found.first and not self._warned_of_result:
            self._warned_of_result = True
            logger.warning(
                "task %s: %s; it is recorded as it is. This is said once", self._name, found.first
            )
        return plain

    def result(self, value: Any) -> Any:
        """A recorded result by the return annotation; the plain data if it does not fit."""
        return _read(self._result, value, RESULT, Findings(strict=False))


_CONTAINERS: Final = (list, tuple, dict, set, frozenset)


def call_types(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> tuple[Any, ...]:
    """The types of the arguments of a call, and its keywords."""
    if kwargs:
        return (*map(type, args), *kwargs, *map(type, kwargs.values()))
    return tuple(map(type, args))


def _read(shape: Shape, value: Any, place: Place, found: Findings) -> Any:
    """The value as the function takes it; unless strict, as it is if it cannot be built.

    Whatever is raised, by a class of the user or because the value is nested too deeply, is a
    misfit. Raises Misfit if strict.
    """
    try:
        return shape.read(value, place, found)
    except Misfit as error:
        text = str(error)
    except Exception as error:  # noqa: BLE001  # see above
        text = raised(place, f"cannot be read as {shape.name}", error)
    if found.strict:
        raise Misfit(text)
    found.first = found.first or text
    return value


def _write(shape: Shape, value: Any, place: Place, found: Findings) -> Any:
    """The value as plain data. Raises Refused, and Misfit if strict; nothing else."""
    try:
        return shape.write(value, place, found)
    except (Misfit, Refused):
        raise
    except RecursionError:
        text = f"{place_text(place)} is nested too deeply, or contains itself"
    except Exception as error:  # noqa: BLE001  # a property of a user's class may raise anything
        text = raised(place, "cannot be written", error)
    raise Refused(text)


def _write_by_name(shape: Shape, value: Any, place: Place, found: Findings) -> Any:
    """What is rich is written, what is plain stays; both must be readable."""
    _read(shape, value, place, found)
    return _write(shape, value, place, Findings(strict=False))


def _same(plain: Arguments, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> bool:
    return all(map(_is, plain[0], args)) and all(map(_is, plain[1].values(), kwargs.values()))


def _is(one: object, other: object) -> bool:
    return one is other


def as_plain(value: Any) -> Any:
    """A value as plain data, by its own types, where no annotation says any. Raises EncodeError.

    What a serializer writes itself is left to that, as before there were converters.
    """
    if value is None or isinstance(value, str | int | float | StoredValue):
        return value
    if isinstance(value, dict):
        return {as_plain(name): as_plain(each) for name, each in value.items()}
    if isinstance(value, list | tuple):
        return [as_plain(each) for each in value]
    shape = Shapes().of(type(value), names_of(type(value)))
    try:
        if shape.plain:
            return plain_of(value)
        return _write(shape, value, "the value", Findings(strict=False))
    except TypeError:
        return value  # the serializer refuses it
    except Refused as error:
        raise EncodeError(str(error)) from None


def texts_in(value: Any) -> Iterator[str]:
    """The texts in plain data, and its numbers as texts, also as a repr shows them."""
    if isinstance(value, Mapping):
        for each in value.values():
            yield from texts_in(each)
    elif isinstance(value, list | tuple | set | frozenset):
        for each in value:
            yield from texts_in(each)
    elif isinstance(value, str | bytes):
        texts = [repr(value).removeprefix("b")[1:-1]]
        texts += [value if isinstance(value, str) else value.decode("utf-8", "replace")]
        yield from (text for text in texts if len(text) >= SHORTEST)
    elif value is not None and not isinstance(value, bool) and len(str(value)) >= SHORTEST:
        yield str(value)
