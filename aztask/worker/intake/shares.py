"""How the queues of a worker share its room by weight, so that none starves.

Rules
1. Each free place is granted to one queue, in turns by weight, among the queues that have messages.
   So with the weights 4 and 1, four of five tasks come from the first queue while both have some.
2. A queue is *live* while its receives find messages. It keeps no place that it cannot fill: when a
   receive finds nothing, what was granted goes to the others.
3. A queue that is not live costs the others nothing. It may bring a share of the window at once,
   so that its next message is noticed; if the worker holds all that it wants, one message. That is
   how a message of a high priority passes those that a worker has prefetched.
4. In queues with sessions a place belongs to a session until that is given up, so the shares bound
   how many sessions are served.

Only the supervisor's loop uses this.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Final

from aztask.worker.intake.ports import PlainIntake, SessionsIntake
from aztask.worker.pipeline.rotation import Rotation

GIVE_UP: Final = -1
"""The room of a queue with sessions that serves too many: a session is given up."""


class Shares:
    """Grants the places of a worker to its queues."""

    def __init__(
        self,
        weights: Mapping[str, int],
        plain: Sequence[PlainIntake],
        sessions: Sequence[SessionsIntake],
    ) -> None:
        """weights: by queue name; a queue without one has weight 1."""
        self._weights = weights
        self._plain = plain
        self._sessions = sessions
        self._rotation = Rotation(weights)
        self._granted: defaultdict[str, int] = defaultdict(int)

    def received(self, queue: str, count: int) -> None:
        """Note that deliveries of a queue have arrived."""
        self._granted[queue] -= count

    def allow(
        self, room: int, window: int, *, ahead: bool, wait: bool, paused: frozenset[str]
    ) -> None:
        """Grant the room to the queues.

        room: how many more deliveries the worker wants. window: how many it wants in all.
        ahead: whether it prefetches. wait: grant nothing new now, see `Intakes.allow`.
        """
        open_plain = [each for each in self._plain if each.queue not in paused]
        live = {each.queue: each for each in open_plain if each.live}
        busy = {each.queue for each in self._sessions if not each.idle and each.queue not in paused}
        total = sum(self._weight(name) for name in {*live, *busy})
        for queue in self._sessions:
            self._allow_sessions(queue, room, window, total, paused, busy)
        for plain in self._plain:
            if plain.queue not in live:
                target = 0
                if plain.queue not in paused:
                    target = self._of_quiet(plain.queue, room, window, ahead=ahead)
                self._grant(plain, target - self._granted[plain.queue])
        if not live or wait:
            return
        turns: defaultdict[str, int] = defaultdict(int)
        for _ in range(room - sum(self._granted[name] for name in live)):
            turns[self._rotation.next(live)] += 1
        for name, count in turns.items():
            self._grant(live[name], count)

    def _grant(self, queue: PlainIntake, change: int) -> None:
        self._granted[queue.queue] += change
        queue.grant(change)

    def _of_quiet(self, queue: str, room: int, window: int, *, ahead: bool) -> int:
        """What a queue may bring in which no message was found (rule 3)."""
        if room <= 0:
            return int(ahead)
        names = [each.queue for each in self._plain] + [each.queue for each in self._sessions]
        every = sum(self._weight(name) for name in names)
        return min(room, max(1, window * self._weight(queue) // every))

    def _allow_sessions(
        self,
        queue: SessionsIntake,
        room: int,
        window: int,
        total: int,
        paused: frozenset[str],
        busy: set[str],
    ) -> None:
        """Set how many sessions a queue may serve (rule 4)."""
        if queue.queue in paused:
            queue.allow(GIVE_UP)
            return
        weight = self._weight(queue.queue)
        total += 0 if queue.queue in busy else weight
        left = max(1, math.ceil(window * weight / total)) - queue.working
        if left > 0 and room <= 0:
            left = 0 if queue.working else 1
        queue.allow(max(GIVE_UP, left))

    def _weight(self, queue: str) -> int:
        return self._weights.get(queue, 1)
