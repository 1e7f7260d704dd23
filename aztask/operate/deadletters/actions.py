"""The dead letters of all queues: find and group them, replay, edit and purge a selection."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from itertools import islice
from typing import Any, ClassVar, Final

from aztask.app import App
from aztask.errors import ConfigurationError, NotFound
from aztask.operate.action import Action, Progress, Subject
from aztask.operate.deadletters.letters import (
    DeadLetterView,
    LetterGroup,
    Positions,
    ReadLetters,
    Selection,
)
from aztask.operate.deadletters.sweep import Report
from aztask.operate.deadletters.view import DeadLetters, ReplayJournal
from aztask.operate.queues import LeftOut, all_queues
from aztask.support.display import plural, visible

PAGE: Final = 500
"""Dead letters that are read at a time."""


@dataclass(frozen=True, slots=True)
class LettersFound:
    """Dead letters, the oldest of each queue first. damaged: ids and reasons of damaged notes."""

    letters: Sequence[DeadLetterView]
    left_out: LeftOut
    damaged: Sequence[tuple[str, str]]


@dataclass(frozen=True, slots=True)
class GroupsFound:
    """Groups with their queues, the largest of each queue first."""

    groups: Sequence[tuple[str, LetterGroup]]
    left_out: LeftOut
    damaged: Sequence[tuple[str, str]]


class _Reading:
    """The dead letters of these queues; () means all. A queue that is named must answer."""

    def __init__(self, app: App, queues: Sequence[str]) -> None:
        self.left_out = LeftOut()
        self._named = bool(queues)
        names = queues or all_queues(app, self.left_out)
        self.places = [DeadLetters(app, name) for name in names]

    def reading(self, letters: DeadLetters) -> AbstractContextManager[None]:
        """Leave out a queue that refuses, unless it was named."""
        return nullcontext() if self._named else self.left_out.reading(letters.queue)

    def find(self, selection: Selection) -> Iterator[DeadLetterView]:
        """Those that are selected, queue by queue."""
        for letters in self.places:
            with self.reading(letters):
                yield from letters.find(selection)

    def damaged(self) -> list[tuple[str, str]]:
        """The damaged notes that were met."""
        return [pair for letters in self.places for pair in letters.damaged.items()]


def find(
    app: App, queues: Sequence[str], selection: Selection, limit: int | None = None
) -> LettersFound:
    """Up to `limit` selected dead letters. Raises QueueNotFound, BrokerUnavailable."""
    reading = _Reading(app, queues)
    found = list(islice(reading.find(selection), limit))
    return LettersFound(found, reading.left_out, reading.damaged())


@dataclass(frozen=True, slots=True)
class LettersPage:
    """A page of dead letters, the oldest first. next: behind which the next one begins, or ""."""

    letters: Sequence[DeadLetterView]
    next: str


def page(
    app: App, queue: str, selection: Selection, *, limit: int = 50, after: str = ""
) -> LettersPage:
    """A page of the selected dead letters of a queue. after: `LettersPage.next` of the one before.

    Raises NotFound for a position that is gone where the service does not list behind one, and
    QueueNotFound, BrokerUnavailable.
    """
    letters = DeadLetters(app, queue)
    if not app.broker.capabilities.paged_peek:
        found = letters.find(selection)
        if after and not any(str(each.position) == after for each in found):
            raise NotFound("this page does not exist now; go back to the first page of the list")
    else:
        found = _behind(letters, selection, after)
    some = list(islice(found, limit + 1))
    return LettersPage(some[:limit], str(some[limit - 1].position) if len(some) > limit else "")


def _behind(letters: DeadLetters, selection: Selection, after: str) -> Iterator[DeadLetterView]:
    """The selected ones behind a position, page by page of the service."""
    position: int | str | None = (int(after) if after.isdecimal() else after) or None
    while some := letters.list(PAGE, position):
        yield from (each for each in some if selection.matches(each))
        position = some[-1].position


def groups(app: App, queues: Sequence[str], read: ReadLetters | None = None) -> GroupsFound:
    """All dead letters by task, reason and error signature. Raises as `find` does.

    read: as in `DeadLetters.groups`.
    """
    reading = _Reading(app, queues)
    found: list[tuple[str, LetterGroup]] = []
    for letters in reading.places:
        with reading.reading(letters):
            found += [(letters.queue, group) for group in letters.groups(read)]
    return GroupsFound(found, reading.left_out, reading.damaged())


# -- actions ---------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class SelectedLetters:
    """The selected dead letters of one queue, and how many they are."""

    letters: DeadLetters
    selection: Selection
    count: int


@dataclass(slots=True)
class OnLetters(Action[Report]):
    """Acts on dead letters; `act` returns the report of all queues, which `report` has any time.

    * `parts`: the queues that have some. `left_out`, `damaged`: what could not be counted.
    * `task`: the task's name, "" if they were not selected by it.
    """

    parts: Sequence[SelectedLetters]
    left_out: LeftOut
    damaged: Sequence[tuple[str, str]]
    task: str
    reports: dict[str, Report] = field(default_factory=dict, init=False)

    @property
    def report(self) -> Report:
        """What was done until now, in all queues."""
        total = Report()
        for each in self.reports.values():
            total.done += each.done
            total.lost += each.lost
            total.unreadable += each.unreadable
            total.held_back += each.held_back
            total.refused += each.refused
            total.ids += each.ids
            total.blocked |= each.blocked
        return total

    @property
    def exact(self) -> bool:
        """False where they are selected as they are received, by neither position nor id."""
        selections = [each.selection for each in self.parts]
        return all(each.positions is not None or each.ids for each in selections)

    def __str__(self) -> str:
        places = ", ".join(
            f"{each.count:,} of {visible(each.letters.queue)}" for each in self.parts
        )
        return f"{self.name} {plural(self.count, 'dead letter')} ({places})"

    def subject(self) -> Subject:
        """The queue, and the task's name if it was selected."""
        queues = [each.letters.queue for each in self.parts]
        return Subject(task=self.task, queue=queues[0] if len(queues) == 1 else "")

    def _act(self, progress: Progress) -> Report:
        return self.work(progress)

    def work(self, progress: Progress) -> Report:
        """Act on each queue. An action that consists of this one calls it, and writes the event."""

        def watch(queue: str) -> Callable[[Report], None]:
            def seen(report: Report) -> None:
                self.reports[queue] = report
                total = self.report
                self.done = total.done
                progress(total.done + total.lost + total.held_back + total.refused)

            return seen

        for part in self.parts:
            queue = part.letters.queue
            self.reports[queue] = self.act_on(part, watch(queue))
            self.done = self.report.done
        return self.report

    @abstractmethod
    def act_on(self, part: SelectedLetters, seen: Callable[[Report], None]) -> Report:
        """Act on the dead letters of one queue."""


def replay(
    app: App,
    queues: Sequence[str],
    selection: Selection,
    *,
    rate: float | None = None,
    fresh: bool = False,
    refused: bool = False,
) -> ReplayLetters:
    """Send dead letters to their queues again. queues: () means all. rate: of messages a second.

    fresh: without checkpoints and recorded steps. refused: those too that were refused as too old
    or unsigned. See `DeadLetters.replay`. Raises QueueNotFound, BrokerUnavailable.
    """
    reading = _Reading(app, queues)
    parts = [each for each in _counted(app, reading, selection) if each.count]
    return ReplayLetters(
        app,
        sum(each.count for each in parts),
        parts,
        reading.left_out,
        reading.damaged(),
        selection.task or "",
        rate,
        fresh,
        refused,
    )


def replay_counted(
    app: App, counted: Mapping[str, tuple[Selection, int]], *, rate: float | None = None
) -> ReplayLetters:
    """Replay what was selected and counted elsewhere, by queue."""
    parts = [
        SelectedLetters(DeadLetters(app, queue), selection, count)
        for queue, (selection, count) in counted.items()
        if count
    ]
    return ReplayLetters(app, sum(each.count for each in parts), parts, LeftOut(), (), "", rate)


def replay_by_id(app: App, queues: Mapping[str, set[str]]) -> ReplayLetters:
    """Replay the dead letters of these tasks, by queue."""
    counted = {}
    for queue, ids in queues.items():
        selection = Selection(ids=frozenset(ids))
        counted[queue] = selection, DeadLetters(app, queue).count(selection)
    return replay_counted(app, counted)


@dataclass(slots=True)
class ReplayLetters(OnLetters):
    """Replays dead letters; see `DeadLetters.replay`."""

    name: ClassVar[str] = "replay"

    rate: float | None = None
    fresh: bool = False
    refused: bool = False
    journal: ReplayJournal | None = field(default=None, init=False, repr=False)

    def __str__(self) -> str:
        text = OnLetters.__str__(self)
        if self.refused:
            text += (
                ", also those that were refused as too old or unsigned: they are signed anew and"
                " run, even if a stranger made them"
            )
        return f"{text} from the start: their recorded steps run again" if self.fresh else text

    def act_on(self, part: SelectedLetters, seen: Callable[[Report], None]) -> Report:
        """Replay those of one queue."""
        return part.letters.replay(
            part.selection,
            rate=self.rate,
            fresh=self.fresh,
            refused=self.refused,
            journal=self.journal,
            progress=seen,
        )


def edit(
    app: App, queue: str, task_id: str, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> EditLetter:
    """Send one dead letter again with other arguments, signed anew. Its key, if unique, stays.

    Raises NotFound, ConfigurationError for one that cannot be edited, TypeError or EncodeError for
    arguments that its task does not take.
    """
    letters = DeadLetters(app, queue)
    selection = Selection(ids=frozenset({task_id}))
    found = next(letters.find(selection), None)
    if found is None:
        raise NotFound(f"queue {queue} has no dead letter {task_id}; see: aztask dlq list")
    if found.message is None or app.codec.decode_embed(found.message):
        raise ConfigurationError(
            f"dead letter {task_id} cannot be edited: "
            f"{found.problem or 'what follows it is part of its body'}"
        )
    task = app.tasks.get(found.message.task)
    if task is not None:
        try:
            task.check_arguments(tuple(args), dict(kwargs))
        except TypeError as error:
            raise ConfigurationError(str(error)) from None
        args, kwargs = task.named_invocation(args, dict(kwargs)).plain
    app.codec.encode_arguments(args, kwargs)
    part = SelectedLetters(letters, selection, 1)
    return EditLetter(app, 1, [part], LeftOut(), (), found.message.task, (args, kwargs), task_id)


@dataclass(slots=True)
class EditLetter(OnLetters):
    """Replays one dead letter with other arguments. They are in no event and in no audit."""

    name: ClassVar[str] = "edit"

    arguments: tuple[Sequence[Any], Mapping[str, Any]] = field(repr=False)
    task_id: str

    def __str__(self) -> str:
        queue = self.parts[0].letters.queue
        return f"replay dead letter {visible(self.task_id)} of {visible(queue)}, edited"

    def subject(self) -> Subject:
        """The task that is sent again."""
        return Subject(self.task_id, self.task, self.parts[0].letters.queue)

    def act_on(self, part: SelectedLetters, seen: Callable[[Report], None]) -> Report:
        """Send it again with the new arguments, and complete the old one."""
        return part.letters.replay(part.selection, arguments=self.arguments, progress=seen)


def purge(app: App, queues: Sequence[str], selection: Selection) -> PurgeLetters:
    """Delete dead letters for good. queues: () means all. Raises as `replay` does.

    Of everything, those are deleted that arrive until then, too: the service empties the queue.
    """
    reading = _Reading(app, queues)
    if selection.everything:
        parts = []
        for letters in reading.places:
            with reading.reading(letters):
                parts.append(SelectedLetters(letters, selection, letters.count(selection)))
    else:
        parts = _counted(app, reading, selection)
    parts = [each for each in parts if each.count]
    total, task = sum(each.count for each in parts), selection.task or ""
    return PurgeLetters(app, total, parts, reading.left_out, reading.damaged(), task)


@dataclass(slots=True)
class PurgeLetters(OnLetters):
    """Deletes dead letters; see `DeadLetters.purge`."""

    name: ClassVar[str] = "purge"

    def act_on(self, part: SelectedLetters, seen: Callable[[Report], None]) -> Report:
        """Purge those of one queue."""
        return part.letters.purge(part.selection, progress=seen)


def _counted(app: App, reading: _Reading, selection: Selection) -> list[SelectedLetters]:
    """The selected dead letters of each queue, by position where the service has positions.

    So a dead letter that comes after the count is left alone. Without pages, a service shows its
    first messages only: the selection is met by what is received.
    """
    parts = []
    for letters in reading.places:
        with reading.reading(letters):
            if not app.broker.capabilities.paged_peek:
                parts.append(SelectedLetters(letters, selection, letters.count(selection)))
                continue
            found = Positions(each.position for each in letters.find(selection))
            parts.append(SelectedLetters(letters, Selection(positions=found), len(found)))
    return parts
