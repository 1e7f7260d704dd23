"""Dead letters: list them, send them again, delete them.

Rules
1. Listing never takes: `list`, `find`, `count` and `groups` peek.
2. A replay or a purge takes each dead letter under a lease, which is renewed until it is settled or
   released. If the service delivers dead letters only in order, unselected ones are leased in the
   meantime, too, and released at the end; that does not count as a delivery if the service can do
   so.
3. Only dead letters that existed at the start are acted on: a replayed message that fails again at
   once is not replayed without end.
4. A dead letter is completed only after its replacement was accepted.
5. Memory does not grow with the bodies: of a million dead letters the positions are kept, at eight
   bytes each.
"""

from __future__ import annotations

import uuid
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import islice
from typing import Any, Protocol, TypeAlias

from aztask.app import App
from aztask.errors import CodecError, ConfigurationError, ForeignId
from aztask.message.envelope import living
from aztask.message.headers import SIGNATURES
from aztask.message.message import TaskMessage
from aztask.operate.deadletters.letters import (
    DeadLetterBrowser,
    DeadLetterView,
    GroupName,
    LetterGroup,
    Positions,
    ReadLetter,
    ReadLetters,
    Selection,
)
from aztask.operate.deadletters.sweep import (
    COPIES_WITHIN,
    HeldLetter,
    Replacement,
    Report,
    Sweep,
)
from aztask.queues.base import Delivery, Peeked, Position, shared_transaction
from aztask.support.clock import SYSTEM_CLOCK, Clock
from aztask.uniqueness.engine import split

__all__ = ["DeadLetterView", "DeadLetters", "LetterGroup", "Report", "Selection"]

PAGE = 100
UNDECODABLE = "undecodable"
BATCH = 100


class DeadLetters:
    """The dead letters of one queue.

    ::

        letters = DeadLetters(app, "orders")
        for group in letters.groups():
            print(group.count, group.signature)
        letters.replay(Selection(task="shop.charge"), rate=10)
    """

    def __init__(
        self,
        app: App,
        queue: str,
        *,
        clock: Clock = SYSTEM_CLOCK,
    ) -> None:
        self.queue = queue
        self._app = app
        self._clock = clock
        self._damaged: dict[str, str] = {}

    @property
    def damaged(self) -> Mapping[str, str]:
        """Dead letters that the last listing skipped, because their notes in the index are damaged.

        A mapping of message ids to reasons. A replay or a purge by such an id still takes the dead
        letter.
        """
        return self._damaged

    def list(self, limit: int = PAGE, after: Position | None = None) -> Sequence[DeadLetterView]:
        """Up to `limit` dead letters in order of position, starting after `after`.

        Without `after`, all known ones are listed, also those that are only in the index because
        the service shows only its first ones. Raises QueueNotFound, BrokerUnavailable.
        """
        browser = self._browser()
        if after is None and browser.whole:
            return [self._view(each) for each in islice(browser.all(), limit)]
        peeked = self._app.broker.peek(self.queue, dead_letter=True, after=after, limit=limit)
        return [self._view(each) for each in peeked]

    def find(self, selection: Selection) -> Iterator[DeadLetterView]:
        """Every selected dead letter, page by page.

        If the service shows only its first messages (a Storage queue: 32), these, and with a result
        store those in its index.
        """
        return (letter for letter in self._all() if selection.matches(letter))

    def count(self, selection: Selection) -> int:
        """How many are selected; those with a damaged note count if you select them by id."""
        found = sum(1 for _ in self.find(selection))
        return found + len(selection.ids.intersection(self._damaged))

    def groups(self, read: ReadLetters | None = None) -> Sequence[LetterGroup]:
        """All dead letters by task, reason and error signature, the largest group first.

        read: what the caller has read of them before, for one who asks again and again.
        """
        self._damaged.clear()
        before: Mapping[Position, ReadLetter] = {} if read is None else read.of(self.queue)
        found: dict[Position, ReadLetter] = {}
        counts: Counter[GroupName] = Counter()
        times: dict[GroupName, tuple[float, float]] = {}
        for each in self._browser().all():
            at = each.enqueued_at
            known = before.get(each.position)
            if known is None or known[0] != at:
                letter = self._view(each)
                known = at, (letter.task, letter.reason, letter.signature)
            if read is not None:
                found[each.position] = known
            name = known[1]
            counts[name] += 1
            first, last = times.get(name, (at, at))
            times[name] = (min(first, at), max(last, at))
        if read is not None:
            read.keep(self.queue, found)
        return [LetterGroup(*name, count, *times[name]) for name, count in counts.most_common()]

    def replay(
        self,
        selection: Selection,
        *,
        rate: float | None = None,
        fresh: bool = False,
        refused: bool = False,
        arguments: tuple[Sequence[Any], Mapping[str, Any]] | None = None,
        journal: ReplayJournal | None = None,
        progress: Callable[[Report], None] = lambda report: None,
    ) -> Report:
        """Send the selected dead letters again, as new generations, then complete them.

        * `fresh`: they begin from the start: without their checkpoints, and with a new history of
          steps, so that recorded steps run again.
        * `refused`: vouch for messages that were refused as too old or unsigned: they are signed
          anew and run. Without it they stay (`Report.refused`), as any program that may send can
          have made an unsigned one, or have sent an old one again.
        * `rate`: messages per second at most; no limit by default.
        * `arguments`: (args, kwargs) that replace those of each one; it is signed anew.
        * `journal`: where the generations are kept, so that a later process can go on.
        * `progress`: called after each batch with the report so far.

        A dead letter that cannot be decoded is sent again byte for byte, with a fresh message id.
        One that even the client library could not read (`Report.unreadable`) stays among the dead
        letters.

        Crash window: if the process dies after the send and before the dead letter is completed,
        the message is sent and the dead letter still exists. Replaying it again makes the same
        message id, which duplicate detection drops, or the worker does, when it finds the run in
        the result store. Only if that run has ended by then does it run again, as a further
        generation: the store cannot distinguish it from a run that another caller requested. With a
        journal, it gets the same generation and does not run again. If broker and results share a
        local file, send and completion are one transaction, and there is no window.

        Raises BrokerUnavailable, SendUnconfirmed (it is still a dead letter: replay it again), and
        ConfigurationError if signed messages would be sent without a signing key.
        """
        if rate is not None and not 0 < rate < float("inf"):
            raise ConfigurationError(f"rate takes messages a second above 0, not {rate!r}")
        pace = _RateLimiter(rate, self._clock)
        generations = _Generations(self._app, fresh=fresh, arguments=arguments, journal=journal)
        size = 1 if shared_transaction(self._app.broker, self._app.results) else BATCH
        return self._act(
            selection,
            pace.limit(size),
            lambda sweep, batch: self._replace(sweep, batch, generations, refused=refused),
            progress,
            pace,
        )

    def purge(
        self,
        selection: Selection,
        *,
        progress: Callable[[Report], None] = lambda report: None,
    ) -> Report:
        """Delete the selected dead letters for good. Raises BrokerUnavailable, QueueNotFound.

        If the process dies in between, some are deleted and the rest are not. On a Storage queue,
        the number of all is the service's approximate count, without the copies that it shows.
        """
        if selection.everything:
            browser = self._browser()
            copies = browser.copies()
            done = max(0, self._app.broker.purge(self.queue, dead_letter=True) - copies)
            browser.emptied()
            return Report(done=done)
        pace = _RateLimiter(None, self._clock)
        return self._act(selection, BATCH, Sweep.remove, progress, pace)

    # -- inside ------------------------------------------------------------------------------

    def _act(
        self,
        selection: Selection,
        size: int,
        act: Callable[[Sweep, Sequence[HeldLetter]], None],
        progress: Callable[[Report], None],
        pace: _RateLimiter,
    ) -> Report:
        """Call `act` with all dead letters that are selected now, in batches."""
        capabilities = self._app.broker.capabilities
        selected: Positions | None = None
        if capabilities.paged_peek:
            selected = selection.only_positions()
            if selected is None:
                selected = Positions(letter.position for letter in self.find(selection))
        remaining = (
            len(selected) if selected is not None else self._app.broker.stats(self.queue).dead or 0
        )
        if not remaining:
            return Report()
        browser = self._browser()
        with Sweep(self._app, self.queue, clock=self._clock) as sweep:
            if selected is not None and capabilities.dead_by_position:
                batches = self._picked(sweep, selected)
            else:
                batches = self._swept(sweep, selection, selected, remaining, browser)
            for batch in batches:
                for start in range(0, len(batch), size):
                    some = batch[start : start + size]
                    act(sweep, some)
                    browser.gone([taken.letter for taken in some if sweep.settled(taken)])
                    progress(sweep.report)
                    pace.wait(len(some))
            if selected is not None:
                report = sweep.report
                known = report.done + report.lost + report.unreadable + report.held_back
                known += report.refused
                report.lost += len(selected) - known  # leased by another process, or gone
        return sweep.report

    def _picked(self, sweep: Sweep, selected: Positions) -> Iterator[Sequence[HeldLetter]]:
        """Take only the selected ones, by position."""
        positions = iter(selected)
        while chunk := tuple(islice(positions, BATCH)):
            yield [HeldLetter(self._view(each.delivery), each) for each in sweep.take_at(chunk)]

    def _swept(
        self,
        sweep: Sweep,
        selection: Selection,
        selected: Positions | None,
        remaining: int,
        browser: DeadLetterBrowser,
    ) -> Iterator[Sequence[HeldLetter]]:
        """Take all in order and pick the selected ones, until `remaining` were met."""
        while remaining > 0 and (leases := sweep.take(BATCH)):
            browser.met([lease.delivery for lease in leases])
            met = [HeldLetter(self._view(lease.delivery), lease) for lease in leases]
            if selected is None:
                batch = [taken for taken in met if selection.matches(taken.letter)]
                remaining -= len(met)
            else:
                batch = [taken for taken in met if taken.letter.position in selected]
                remaining -= len(batch)
            sweep.keep_aside(len(met) - len(batch))
            yield batch
        browser.met_all()

    def _all(self) -> Iterator[DeadLetterView]:
        self._damaged.clear()
        return (self._view(each) for each in self._browser().all())

    def _replace(
        self,
        sweep: Sweep,
        batch: Sequence[HeldLetter],
        generations: _Generations,
        *,
        refused: bool,
    ) -> None:
        """Replay these, except those that the client library could not read, which stay.

        refused: those too that were refused as too old or unsigned.
        """
        readable = [taken for taken in batch if not taken.letter.envelope.problem]
        sweep.report.unreadable += len(batch) - len(readable)
        if refused:
            readable = [replace(each, letter=self._vouched(each.letter)) for each in readable]
        else:
            readable = [each for each in readable if not self._stays(each, sweep)]
        new = [(taken, self._replacement(taken.letter, generations)) for taken in readable]
        free = [pair for pair in new if self._is_free(pair, sweep)]
        generations.plan([taken.letter for taken, _ in free])
        sweep.replace(free)
        generations.settled([taken.letter for taken, _ in free if sweep.settled(taken)])

    def _is_free(self, pair: tuple[HeldLetter, Replacement], sweep: Sweep) -> bool:
        """Take the key of a unique task again; False if another task holds it.

        If the process dies before the send, the key is free again after a minute.
        """
        message = pair[1].message
        if message is None or not split(message)[1]:
            return True
        holder = self._app.unique_engine(message.task).retake(message)
        if holder and not sweep.is_copy(pair[0]):
            sweep.note(pair[0])
            sweep.report.held_back += 1
            sweep.report.blocked[message.id] = holder
        return not holder

    def _stays(self, taken: HeldLetter, sweep: Sweep) -> bool:
        """Whether it was refused as too old or unsigned; if so, it is counted."""
        if not self._was_refused(taken.letter):
            return False
        if not sweep.is_copy(taken):
            sweep.note(taken)
            sweep.report.refused += 1
        return True

    def _was_refused(self, letter: DeadLetterView) -> bool:
        """Whether a worker with keys refuses the message as it is, or did so for its age.

        A program that receives may have dead-lettered it with any reason, so the reason is not all
        that counts: the message's age is that at which the service got it.
        """
        if not self._app.codec.signs:
            return False
        if letter.message is None:
            return not SIGNATURES & letter.envelope.headers.keys()
        if not SIGNATURES & letter.envelope.headers.keys():
            return False  # a foreign one, for a handler
        named = letter.reason == UNDECODABLE and "signature_max_age" in letter.description
        return named or bool(self._app.codec.age_at(letter.envelope, self.queue, letter.at))

    def _vouched(self, letter: DeadLetterView) -> DeadLetterView:
        """An unsigned dead letter with its message, if that can be read."""
        if letter.message is not None or not self._was_refused(letter):
            return letter
        try:
            message = self._app.codec.from_unsigned(letter.envelope, self.queue)
        except CodecError:
            return letter  # it is sent as it is, and refused again
        return replace(letter, message=message, problem="")

    def _browser(self) -> DeadLetterBrowser:
        return DeadLetterBrowser(self._app, self.queue, self._clock, self._damaged)

    def _replacement(self, letter: DeadLetterView, generations: _Generations) -> Replacement:
        """The replacement of a dead letter."""
        message = letter.message
        if message is None:
            name = f"{self.queue} {letter.position} {letter.envelope.message_id}"
            fresh = self._app.codec.keyed_id(
                str(uuid.uuid5(uuid.NAMESPACE_OID, f"aztask-replay {name}"))
            )
            envelope = replace(
                letter.envelope,
                headers=living(letter.envelope.headers),
                message_id=fresh,
                delay=0.0,
                expires_at=None,
            )
            return Replacement(envelope, None)
        signed = SIGNATURES & letter.envelope.headers.keys()
        if signed and not self._app.settings.signing_keys:
            raise ConfigurationError(
                "the dead letters are signed and no signing key is configured here; name the app "
                "with -A, so that its key signs the replay"
            )
        message = replace(message, generation=generations.before_replay(message))
        if generations.arguments is not None:
            body, kind, encoding = self._app.codec.encode_arguments(*generations.arguments)
            message = replace(
                message,
                body=body,
                content_type=kind,
                content_encoding=encoding,
                payload=None,
                argsrepr=None,
                kwargsrepr=None,
            )
        message = message.replayed(keep_saved=not generations.fresh)
        return Replacement(self._app.codec.to_envelope(message), message)

    def _view(self, found: Peeked | Delivery) -> DeadLetterView:
        message, problem = None, ""
        try:
            message = self._app.message_in(found.envelope, self.queue, found.position, any_age=True)
        except CodecError as error:
            problem = str(error)
        return DeadLetterView(
            self.queue,
            found.position,
            found.envelope,
            found.dead_letter_reason or "",
            found.dead_letter_description or "",
            found.enqueued_at,
            found.delivery_count,
            message,
            problem,
        )


InvocationKey: TypeAlias = tuple[str, int, int]
"""Task id, generation and hop."""


class ReplayJournal(Protocol):
    """Keeps which generation each replay follows, over the death of its process."""

    def known(self) -> Mapping[InvocationKey, int]:
        """What an earlier process had planned and may have sent."""
        ...

    def plan(self, unsettled: Mapping[InvocationKey, int]) -> None:
        """Keep what is about to be sent, and all that was sent and may be a dead letter still.

        It takes the place of what was kept before. Raises AztaskError if this process may not go
        on.
        """
        ...


class _Generations:
    """Decides which generation a dead letter's replay follows. One for each replay."""

    def __init__(
        self,
        app: App,
        *,
        fresh: bool,
        arguments: tuple[Sequence[Any], Mapping[str, Any]] | None = None,
        journal: ReplayJournal | None = None,
    ) -> None:
        """fresh: whether they begin from the start. arguments, journal: as in the replay."""
        self.fresh = fresh
        self.arguments = arguments
        self._journal = journal
        self._results = app.results
        self._joint = shared_transaction(app.broker, app.results) is not None
        self._given: OrderedDict[InvocationKey, int] = OrderedDict()
        self._unsettled = dict(journal.known()) if journal is not None else {}

    def before_replay(self, message: TaskMessage) -> int:
        """The message's own generation, or a newer known one, so that the replay really runs.

        Copies of one dead letter get the same generation: they are one invocation. A newer
        generation that has not ended counts as an earlier replay of this dead letter that crashed
        before the completion: the same id is made again. With one transaction for both, no such
        crash exists, and a newer generation always comes from another caller.
        """
        if message.key in self._unsettled:
            return self._unsettled[message.key]
        if message.key not in self._given:
            self._given[message.key] = self._newest(message)
            if len(self._given) > COPIES_WITHIN:
                self._given.popitem(last=False)
        return self._given[message.key]

    def plan(self, letters: Sequence[DeadLetterView]) -> None:
        """Keep the generations of a batch in the journal before it is sent.

        Those of earlier batches stay in it until their dead letters are settled: a process that
        died holds its last ones until their leases end, and their replays can have run by then.
        With one transaction for both there is nothing to keep.
        """
        if self._journal is None or self._joint:
            return
        messages = [each.message for each in letters if each.message is not None]
        if messages:
            self._unsettled |= {each.key: self.before_replay(each) for each in messages}
            self._journal.plan(self._unsettled)

    def settled(self, letters: Sequence[DeadLetterView]) -> None:
        """These dead letters are gone: the next batch need not keep them."""
        for each in letters:
            if each.message is not None:
                self._unsettled.pop(each.message.key, None)

    def _newest(self, message: TaskMessage) -> int:
        try:
            known = self._results.get(message.id) if self._results is not None else None
        except ForeignId:
            known = None  # a replay has a key of its own, which the other owner does not have
        newest = known.key.generation if known is not None else 0
        if newest <= message.generation or known is None:
            return message.generation
        return newest if known.state.final or self._joint else newest - 1


class _RateLimiter:
    """Keeps to a rate; without a rate it does nothing."""

    def __init__(self, rate: float | None, clock: Clock) -> None:
        self._rate = rate
        self._clock = clock
        self._next_at = clock.monotonic()

    def limit(self, size: int) -> int:
        """The batch size that keeps each step to about a second, if the rate allows it."""
        return size if self._rate is None else max(1, min(size, int(self._rate)))

    def wait(self, sent: int) -> None:
        """Wait until the next message may be sent, after `sent` messages."""
        if self._rate is None:
            return
        now = self._clock.monotonic()
        self._next_at = max(self._next_at, now) + sent / self._rate
        self._clock.sleep(max(0.0, self._next_at - now))
