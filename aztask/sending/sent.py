"""What a program sent while a test watched, assertions about it, and what `App.inline` gives."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from types import TracebackType
from typing import Any, Protocol

from aztask.result import AsyncResult
from aztask.task import Task


@dataclass(frozen=True, slots=True)
class Sent:
    """One invocation that was sent. `options`: those of `aztask.task.SendOptions` that were given.

    Arguments are as the program passed them, once the codec has accepted them.
    """

    id: str
    task: str
    queue: str
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    options: dict[str, Any] = field(default_factory=dict)

    def __str__(self) -> str:
        texts = [repr(each) for each in self.args]
        texts += [f"{name}={value!r}" for name, value in self.kwargs.items()]
        return f"{self.task}({', '.join(texts)}) to queue {self.queue}"


class InlineMode(Protocol):
    """What ``with app.inline() as inline`` gives you; `aztask.testing.Inline` describes it."""

    sent: list[Sent]

    def __enter__(self) -> InlineMode: ...

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None: ...

    def run(self) -> None: ...

    def advance(self, seconds: float | timedelta) -> None: ...

    @property
    def now(self) -> datetime: ...

    def deliver(
        self, queue: str, body: bytes | str | dict[str, Any] | list[Any], **headers: Any
    ) -> AsyncResult[Any]: ...

    def sent_to(self, task: Task[..., Any] | str) -> list[Sent]: ...

    def assert_sent(self, task: Task[..., Any] | str, *args: Any, **kwargs: Any) -> Sent: ...

    def assert_not_sent(self, task: Task[..., Any] | str) -> None: ...

    def dead_letters(self, queue: str | None = None) -> Sequence[DeadLetterShown]: ...


class DeadLetterShown(Protocol):
    """A dead letter as tests see it; see `aztask.operate.deadletters.view.DeadLetterView`."""

    @property
    def id(self) -> str: ...

    @property
    def reason(self) -> str: ...

    @property
    def description(self) -> str: ...


def named(sent: Sequence[Sent], task: Task[..., Any] | str) -> list[Sent]:
    """Those of one task, which is given itself or by its name."""
    name = task if isinstance(task, str) else task.name
    return [each for each in sent if each.task == name]


def find(
    sent: Sequence[Sent],
    task: Task[..., Any] | str,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> Sent:
    """The first one with these arguments. AssertionError, which lists what was sent, if none is."""
    for each in named(sent, task):
        if (each.args, each.kwargs) == (args, kwargs):
            return each
    name = task if isinstance(task, str) else task.name
    wanted = Sent("", name, "", args, kwargs)
    listed = "".join(f"\n  {each}" for each in sent) or " nothing"
    raise AssertionError(f"{str(wanted).partition(' to queue')[0]} was not sent; sent:{listed}")
