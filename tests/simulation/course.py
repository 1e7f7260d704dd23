"""A course: what a seed draws. It is a list of decisions, which can be shortened and run again.

Rules
1. A decision depends on no other: with any of them left out, the others can be carried out.
2. Which actor steps next is drawn while the course runs, from the same seed.
3. Faults end before the quiet time; from then on everything must come to an end.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any, Final

APPS: Final = ("a", "b")

POINTS: Final = (
    "received",
    "checked",
    "claimed",
    "sent",
    "recorded",
    "settled",
    "bit-set",
    "followed",
    "graph-parts",
    "graph-root",
    "graph-sent",
    "ended",
    "unique-taken",
    "unique-sent",
    "unique-closing",
    "occurrence-made",
    "occurrence-sent",
    "pointed",
    "fetched",
    "parted",
    "replayed",
    "row-filled",
    "start<",
    "start>",
    "record<",
    "record>",
    "settle<",
    "settle>",
    "receive>",
    "renew<",
    "renew>",
    "send<",
    "send>",
)
"""Where an actor can die or freeze: the failpoints, and before (<) and after (>) each request."""

KINDS: Final = (
    *("plain", "plain", "plain", "plain", "abandon", "lapse", "hold", "defer", "once"),
    *(
        "rated",
        "permitted",
        "unique",
        "begun",
        "quiet",
        "step",
        "step",
        "urgent",
        "old",
        "expiring",
    ),
)
"""The tasks of a program, by how often they are drawn; see `programs`."""


@dataclass(frozen=True, slots=True)
class Theme:
    """What a course is mostly about, so that rare things meet often enough.

    * `kinds`: of tasks; `points`: where actors die; `workflows`: their share of what is done.
    """

    kinds: tuple[str, ...]
    points: tuple[str, ...]
    workflows: float = 0.1


RUNS: Final = ("claimed", "start>", "sent", "record<", "record>", "recorded", "settle<", "settle>")
THEMES: Final = (
    Theme(KINDS, POINTS),
    Theme(KINDS, POINTS),
    Theme(("plain", "abandon", "lapse", "hold", "defer", "once", "expiring"), RUNS),
    Theme(
        ("unique", "begun", "quiet", "unique"),
        ("unique-taken", "unique-sent", "unique-closing", "record>", "recorded", "send<", "send>"),
    ),
    Theme(("rated", "permitted", "permitted"), ("claimed", "start>", "sent", "record<", "settle>")),
    Theme(
        ("plain",),
        ("graph-parts", "graph-root", "graph-sent", "bit-set", "followed", "ended", "record>"),
        0.7,
    ),
    Theme(("step", "step", "plain"), (*RUNS, "receive>", "renew<")),
)


KEYS: Final = ("", "", "signed", "encrypted")
"""What the messages and rows of a course are: half of them as they are without keys."""

RETENTION: Final = {"a": 40_000.0, "b": 400_000.0}
"""Seconds for which the store of each app keeps results."""

DAY: Final = 86400.0
LENGTHS: Final = (60.0, 600.0, 3600.0, DAY, 60 * DAY)
"""Seconds until the quiet time."""

LONGEST_PAUSE: Final = 4 * 3600.0
"""Seconds. What is paused is looked at every few minutes."""

SLOTS: Final = (1, 2, 3, 5, 8, 32, 64, 128, 128)
"""Of a worker."""

BULK: Final = 32
"""With so many slots or more, tasks are sent by the thousand."""

COUNTS: Final = (1, 2, 5, 20, 60, 200, 200)
BULK_COUNTS: Final = (1, 20, 200, 500, 1000, 1000)
"""How many tasks are sent at once."""

FLOW_LETTERS: Final = "srefzlwactnopxm"
FLOW_WEIGHTS: Final = (5, 2, 2, 2, 3, 1, 5, 3, 3, 3, 2, 2, 2, 1, 3)
FLOW_TIMEOUT: Final = 20.0
"""Seconds that a flow waits for a signal, see `flows`."""

MEETS: Final = -1.0
"""In the place of the seconds of a signal: it is sent as the time of a wait for it ends."""

FLOW_POINTS: Final = (
    *("step-ran", "step-recorded", "renewed", "timed", "parked", "signalled", "woken"),
    *("recorded", "settle<", "settle>", "record>", "start>"),
)
"""Where actors die or freeze around flows."""

STREAM_POINTS: Final = ("append<", "append<", "append>", "record<", "record>", "settle<", "parked")
"""Where they do around streams."""

COST_POINTS: Final = ("claimed", "sent", "start>", "record<", "recorded", "settle>")
"""Where they do around the tasks of a limit with a cost."""

LONGEST_STORM: Final = 900.0
"""Seconds. While requests take long somewhere, time passes slowly for every worker."""

SHARDS: Final = (0, 0, 1, 3)
MOVE_POINTS: Final = ("reshard-created", "reshard-announced", "reshard-empty", "send<", "send>")
"""Where actors die or freeze around moves of queues."""

SLOW: Final = ("rated", "permitted", "step", "lapse")
"""Of these, many at once would take long."""


@dataclass(frozen=True, slots=True)
class Decision:
    """Something that happens in a course.

    * `at`: seconds from its beginning.
    * `kind`: what; `app`: whose; `what`: how.
    """

    at: float
    kind: str
    app: str = "a"
    what: tuple[Any, ...] = ()

    def __str__(self) -> str:
        return f"{self.at:9.2f}  {self.app}  {self.kind} {' '.join(map(str, self.what))}".rstrip()


@dataclass(frozen=True, slots=True)
class Course:
    """What a seed drew.

    * `kind`: of the queues: "local", "storage" or "bus".
    * `joint`: the first app's broker and result store share a file, and so transactions.
    * `apps`: their labels; `workers`: how many each begins with; `slots`: tasks at once of each,
      in a `pool` of processes or of threads.
    * `every`: seconds between the occurrences of the schedule; 0: there is none.
    * `quiet_at`: from then on there are no faults.
    * `shuffled`: which actor steps next is drawn; else the first that can.
    * `skew`: seconds by which wall clocks of actors are ahead of the services', or behind, at most.
    * `shards`: of two queues at the beginning; 0: they have none.
    * `keys`: one of `KEYS`; those of each app, which each version of its code has in another order.
    """

    seed: int
    joint: bool
    apps: tuple[str, ...]
    workers: int
    slots: int
    every: float
    quiet_at: float
    decisions: tuple[Decision, ...]
    shuffled: bool = True
    kind: str = "local"
    skew: float = 0.0
    pool: str = "processes"
    keys: str = ""
    shards: int = 0

    def with_decisions(self, decisions: tuple[Decision, ...]) -> Course:
        """The same course with these decisions alone."""
        return replace(self, decisions=decisions)

    @property
    def clocks_apart(self) -> float:
        """Seconds by which the wall clocks of two machines may differ, at most."""
        jumps = (abs(float(each.what[1])) for each in self.decisions if each.kind == "clock-jumps")
        return 2.0 * self.skew + sum(jumps)

    def __str__(self) -> str:
        store = "one file" if self.joint else "two files"
        store = store if self.kind == "local" else f"{self.kind} and tables"
        keys = f", {self.keys}" if self.keys else ""
        store += f", {self.shards} shards at first" if self.shards else ""
        order = "" if self.shuffled else ", steps in their plain order"
        return (
            f"seed {self.seed}: apps {', '.join(self.apps)}, {self.workers} workers each with "
            f"{self.slots} slots in {self.pool}, {store}, schedule every {self.every:g} s, "
            f"quiet from {self.quiet_at:g} s{keys}{order}"
        )


def draw(seed: int, *, flows: bool = True) -> Course:
    """The course of a seed. flows: False for one of the time before there were any."""
    dice = random.Random(seed)
    joint = dice.random() < 0.5
    apps = APPS if dice.random() < 0.4 else APPS[:1]
    length = dice.choice(LENGTHS)
    every = dice.choice((0.0, 0.0, 30.0, 3600.0))
    every = max(every, length / 100.0) if every else 0.0
    kind = dice.choice(("local", "local", "storage", "bus"))
    theme, slots = dice.choice(THEMES), dice.choice(SLOTS)
    decisions = [
        *_programs(dice, apps, length, theme, COUNTS if slots < BULK else BULK_COUNTS),
        *_faults(dice, apps, length, theme),
    ]
    skew = 0.0
    decisions += _storms(dice, apps, length)
    if kind != "local":
        skew = dice.choice((0.0, 0.0, 2.0, 60.0, 3600.0))
        decisions += _jumps(dice, apps, length)
    if flows:
        decisions += _flows(random.Random(f"{seed} flows"), apps, length)
        decisions += _costs(random.Random(f"{seed} costs"), apps, length)
        decisions += _streams(random.Random(f"{seed} streams"), apps, length)
    shards = random.Random(f"{seed} shards").choice(SHARDS) if flows and kind == "local" else 0
    if shards:
        decisions += _moves(random.Random(f"{seed} moves"), apps, length)
    decisions.sort(key=lambda each: each.at)
    return Course(
        seed,
        joint,
        apps,
        dice.randint(1, 3),
        slots,
        every,
        length,
        tuple(decisions),
        kind=kind,
        skew=skew,
        pool="threads" if dice.random() < (0.25 if slots < BULK else 0.75) else "processes",
        keys=random.Random(f"{seed} keys").choice(KEYS),
        shards=shards,
    )


def _moves(dice: random.Random, apps: tuple[str, ...], length: float) -> Iterator[Decision]:
    """Moves of queues to another number of shards, and deaths on the way."""
    for _ in range(dice.choice((1, 3, 8))):
        at, app = _time(dice, length), dice.choice(apps)
        what = (dice.choice(("default", "steps")), dice.choice((1, 2, 4, 16)))
        yield Decision(at, "reshard", app, what)
        if dice.random() < 0.4:
            yield _strike(dice, app, at, MOVE_POINTS)


def _storms(dice: random.Random, apps: tuple[str, ...], length: float) -> Iterator[Decision]:
    long = min(length / 5, LONGEST_STORM)
    for number in range(dice.choice((0, 2, 4, 10))):
        what = (number, dice.choice((0.02, 0.1, 0.3)), dice.choice((10.0, 60.0, long)))
        yield Decision(_time(dice, length), "weather", dice.choice(apps), what)


def _jumps(dice: random.Random, apps: tuple[str, ...], length: float) -> Iterator[Decision]:
    for _ in range(dice.choice((0, 0, 1, 3))):
        what = (dice.random(), dice.choice((-4000.0, -20.0, 20.0, 4000.0)))
        yield Decision(_time(dice, length), "clock-jumps", dice.choice(apps), what)


def _programs(
    dice: random.Random,
    apps: tuple[str, ...],
    length: float,
    theme: Theme,
    counts: tuple[int, ...],
) -> list[Decision]:
    made: list[Decision] = []
    for number in range(dice.randint(10, 60) if counts is COUNTS else dice.randint(10, 40)):
        at, app, share = _time(dice, length), dice.choice(apps), dice.random()
        if share < 0.82 - theme.workflows:
            kind = dice.choice(theme.kinds)
            count = dice.choice(counts)
            count = 1 if kind in ("unique", "quiet") else min(count, 10) if kind in SLOW else count
            delay = dice.choice((0.0, 0.0, 0.0, 5.0, length / 5))
            made.append(Decision(at, "send", app, (kind, count, _plan(dice), number % 3, delay)))
        elif share < 0.82:
            made.append(Decision(at, "workflow", app, (_graph(dice, 3), f"f{number}")))
        elif share < 0.88:
            made.append(Decision(at, "cancel", app, (dice.randrange(1000),)))
        elif share < 0.95:
            scope = dice.choice(("task", "queue"))
            seconds = dice.uniform(1.0, min(length / 3, LONGEST_PAUSE))
            made.append(Decision(at, "pause", app, (scope, seconds)))
        elif share < 0.98:
            made.append(Decision(at, "replay", app))
        else:
            made.append(Decision(at, "garbage", app, (number,)))
    return made


def _flows(dice: random.Random, apps: tuple[str, ...], length: float) -> Iterator[Decision]:
    """Flows, with signals before, during and after their waits, and faults at their points."""
    count = dice.choice((0, 0, 5, 15, 40))
    if count:
        yield from _releases(dice, apps, length)
    for _ in range(count):
        plan = "".join(dice.choices(FLOW_LETTERS, FLOW_WEIGHTS, k=dice.randint(1, 7)))
        signals = tuple(
            (dice.choice((0.0, 1.0, 10.0, MEETS, MEETS, dice.uniform(0.0, 100.0))), name)
            for name in dice.choices(("go", "go", "stop"), k=dice.choice((0, 1, 1, 2, 4)))
        )
        app = dice.choice(apps)
        yield Decision(_time(dice, length), "flow", app, (plan, signals))
        if "x" in plan:
            yield Decision(_time(dice, length), "replay", app)
        if dice.random() < 0.2:
            yield _strike(dice, app, _time(dice, length), FLOW_POINTS)


def _strike(dice: random.Random, app: str, at: float, points: tuple[str, ...]) -> Decision:
    """An actor dies or freezes at one of these points."""
    what = (dice.choice(points), dice.randint(1, 6))
    if dice.random() < 0.5:
        return Decision(at, "die-at", app, what)
    return Decision(at, "freeze-at", app, (*what, dice.choice((5.0, 40.0, 100.0))))


def _streams(dice: random.Random, apps: tuple[str, ...], length: float) -> Iterator[Decision]:
    """Tasks that emit, with readers, and faults at the points of their appends."""
    for _ in range(dice.choice((0, 0, 4, 12, 30))):
        at, app = _time(dice, length), dice.choice(apps)
        what = (_plan(dice), dice.choice((0, 1, 4, 12)), dice.choice((0, 1, 2)))
        yield Decision(at, "stream", app, what)
        if dice.random() < 0.3:
            yield _strike(dice, app, max(0.0, at - dice.uniform(0.0, 5.0)), STREAM_POINTS)


def _costs(dice: random.Random, apps: tuple[str, ...], length: float) -> Iterator[Decision]:
    """Tasks under a limit with a cost, and deaths while what they claimed is not corrected."""
    for _ in range(dice.choice((0, 0, 2, 6))):
        at, app = _time(dice, length), dice.choice(apps)
        kind, count = dice.choice(("cost1", "cost2", "cost3")), dice.choice((1, 3, 10))
        yield Decision(at, "send", app, (kind, count, _plan(dice), 0, 0.0))
        if dice.random() < 0.3:
            yield _strike(dice, app, at, COST_POINTS)


def _releases(dice: random.Random, apps: tuple[str, ...], length: float) -> Iterator[Decision]:
    """While flows wait, workers of the release before are there, or the other version comes."""
    for _ in range(dice.choice((0, 1, 1, 3))):
        at, app, seconds = _time(dice, length), dice.choice(apps), dice.choice((20.0, 100.0, 240.0))
        if dice.random() < 0.6:
            yield Decision(at, "former", app, (seconds, dice.choice((1, 1, 2))))
        else:
            yield Decision(at, "deploy", app)
        for _ in range(dice.choice((0, 1, 2))):
            yield Decision(at + dice.uniform(0.0, seconds), "kill", app, (dice.random(),))


def _time(dice: random.Random, length: float) -> float:
    # Bursts: some things happen at the same time.
    at = dice.uniform(0.0, 0.8 * length)
    return at if dice.random() < 0.5 else float(int(at / (length / 10)) * (length / 10))


def _plan(dice: random.Random) -> str:
    """How the runs of a task end, one letter for each; the last one stands for all others."""
    return dice.choice(("o", "o", "o", "o", "fo", "so", "ffso", "ro", "x", "f", "fffffo", "e"))


def _graph(dice: random.Random, depth: int) -> tuple[Any, ...]:
    """A workflow: ("t", name, plan), ("chain" | "group", parts), ("chord", parts, body)."""
    shape = dice.random() if depth else 0.0
    if shape < 0.4:
        return ("t", f"n{dice.randrange(10_000)}", dice.choice(("o", "o", "o", "o", "fo", "so")))
    parts = tuple(_graph(dice, depth - 1) for _ in range(dice.randint(1, 4)))
    if shape < 0.65:
        return ("chain", parts)
    if shape < 0.85:
        return ("group", parts)
    return ("chord", parts, _graph(dice, 0))


def _faults(
    dice: random.Random, apps: tuple[str, ...], length: float, theme: Theme
) -> list[Decision]:
    made: list[Decision] = []
    for _ in range(dice.choice((0, 4, 12, 25, 40))):
        at, app, share = _time(dice, length), dice.choice(apps), dice.random()
        if share < 0.14:
            made.append(Decision(at, "kill", app, (dice.random(),)))
        elif share < 0.36:
            made.append(
                Decision(at, "die-at", app, (dice.choice(theme.points), dice.randint(1, 12)))
            )
        elif share < 0.54:
            what = (dice.choice(theme.points), dice.randint(1, 12), dice.choice((5.0, 40.0, 100.0)))
            made.append(Decision(at, "freeze-at", app, what))
        elif share < 0.66:
            made.append(
                Decision(at, "freeze", app, (dice.random(), dice.choice((5.0, 40.0, 100.0))))
            )
        elif share < 0.76:
            made.append(Decision(at, "kill-process", app, (dice.random(),)))
        elif share < 0.84:
            service, seconds = dice.choice(("broker", "results")), dice.choice((1.0, 20.0, 60.0))
            made.append(Decision(at, "outage", app, (service, seconds)))
        elif share < 0.90:
            made.append(Decision(at, "suspend", app, (dice.choice((20.0, 100.0, 4000.0)),)))
        elif share < 0.96:
            made.append(Decision(at, "drain", app, (dice.random(),)))
        else:
            made.append(Decision(at, "deploy", app))
    return made
