"""A smoke run against a real namespace and account: what only they can show, check by check.

Rules
1. Each check has a queue, table or container of its own, whose name tells the run
   (`aztask.operate.verifybench`). Nothing else is changed, and nothing else is read but the
   settings of the app's own queues, by the check `plan`.
2. They are deleted at the end of the check. What a killed run has left is found by its prefix.
3. A check names the rule of docs/rules.md that it proves. It passes, fails with what was seen, or
   is skipped with the reason: the service cannot do it, or a permission is missing.
4. A report has no address, key or name of a queue that the run did not make.
"""

from __future__ import annotations

import html
import tempfile
import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final, Literal, TypeAlias

from aztask.address.owner import NO_OWNER
from aztask.app import App
from aztask.errors import AztaskError, BrokerUnavailable, ConfigurationError
from aztask.operate.doctor import SKEW_SECONDS
from aztask.operate.queuechecks import judge
from aztask.operate.resharding import refuse_several
from aztask.operate.verifybench import LATE, LOCK, Bench, Refuted, Skipped, late_module
from aztask.operate.verifyload import latency, throughput
from aztask.operate.verifyroles import VARIABLES, role_check
from aztask.operate.verifystores import store_check
from aztask.queues.base import (
    Inspectable,
    Lost,
    Renewed,
    Settled,
)
from aztask.settlement import Abandon, Complete, DeadLetter, Defer
from aztask.stores.rows import Change, Place, Row, Rows
from aztask.support.clock import monotonic
from aztask.support.display import mask, plural
from aztask.support.finding import Level
from aztask.support.parts import reason_of
from aztask.support.versions import versions

State: TypeAlias = Literal["passed", "failed", "skipped", "waiting"]
"""``waiting`` is a long proof whose time has not come (`aztask.operate.verifylong`)."""


@dataclass(frozen=True, slots=True)
class Proof:
    """What became of one check."""

    check: str
    rule: str
    state: State
    text: str
    seconds: float


# -- the checks ------------------------------------------------------------------------------------


def _queue(bench: Bench) -> str:
    queue = bench.queue(max_deliveries=20 if bench.broker.capabilities.own_limits else None)
    if not isinstance(bench.broker, Inspectable):
        raise Skipped("its settings cannot be read")
    facts = bench.broker.inspector().facts(queue)
    if facts.unread:
        raise Skipped(facts.unread)
    if facts.exists is False or (facts.lease_seconds or LOCK) != LOCK:
        raise Refuted(f"exists {facts.exists}, lock {facts.lease_seconds} s")
    return f"created, with a lock of {facts.lease_seconds or LOCK:g} s"


def _lock(bench: Bench) -> str:
    queue = bench.queue()
    bench.send(queue, b"x")
    receiver = bench.receiver(queue)
    delivery = bench.one(receiver)
    bench.nothing(bench.receiver(queue))
    bench.complete(receiver, delivery)
    bench.nothing(bench.receiver(queue))
    return "one receiver had it, and completing removed it"


def _renewal(bench: Bench) -> str:
    queue = bench.queue()
    bench.send(queue, b"x")
    receiver, other = bench.receiver(queue), bench.receiver(queue)
    delivery = bench.one(receiver)
    began = monotonic()
    while monotonic() - began < 1.5 * LOCK:
        bench.nothing(other, LOCK * 0.4)
        (answer,) = receiver.renew([delivery])
        if not isinstance(answer, Renewed):
            raise Refuted(f"a renewal was answered with {type(answer).__name__}")
    bench.complete(receiver, delivery)
    return f"held for {monotonic() - began:.0f} s under a lock of {LOCK:g} s"


def _lapse(bench: Bench) -> str:
    queue = bench.queue()
    bench.send(queue, b"x")
    receiver = bench.receiver(queue)
    late = bench.one(receiver)
    began = monotonic()
    other = bench.receiver(queue)
    again = bench.one(other, LOCK + LATE)
    after = monotonic() - began
    if again.delivery_count != 2:
        raise Refuted(f"the delivery count is {again.delivery_count}")
    answer = bench.settle(receiver, late, Complete())
    if not isinstance(answer, Lost):
        raise Refuted(f"a late settlement was answered with {type(answer).__name__}")
    bench.complete(other, again)
    return f"delivered again after {after:.1f} s, and the late settlement changed nothing"


def _sessions(bench: Bench) -> str:
    if not bench.broker.capabilities.sessions:
        raise Skipped("the service has no sessions")
    queue = bench.queue(sessions=True)
    for body, session in ((b"a1", "a"), (b"b1", "b"), (b"a2", "a")):
        bench.send(queue, body, session=session)
    first, second = bench.receiver(queue, session="a"), bench.receiver(queue, session="b")
    got = [bench.one(first), bench.one(first)]
    if [each.envelope.body for each in got] != [b"a1", b"a2"]:
        raise Refuted(f"the order was {[each.envelope.body for each in got]}")
    bench.nothing(bench.receiver(queue, session="a"))
    bench.complete(second, bench.one(second))
    for each in got:
        bench.complete(first, each)
    return "in order, and one receiver for each session"


def _deferral(bench: Bench) -> str:
    if not bench.broker.capabilities.defer:
        raise Skipped("the service defers nothing")
    queue = bench.queue()
    bench.send(queue, b"x")
    receiver = bench.receiver(queue)
    delivery = bench.one(receiver)
    if not isinstance(bench.settle(receiver, delivery, Defer()), Settled):
        raise Refuted("it was not deferred")
    bench.nothing(receiver)
    found = receiver.receive_deferred([delivery.position])
    if len(found) != 1:
        raise Refuted("its number does not find it")
    bench.complete(receiver, found[0])
    return f"found by its number alone, with the delivery count {found[0].delivery_count}"


def _duplicates(bench: Bench) -> str:
    if not bench.broker.capabilities.duplicate_detection:
        raise Skipped("the service detects no duplicates")
    queue = bench.queue(duplicate_window=60.0)
    bench.send(queue, b"first", message_id="one")
    bench.send(queue, b"again", message_id="one")
    bench.send(queue, b"clone", message_id="two")
    receiver = bench.receiver(queue)
    got = [bench.one(receiver), bench.one(receiver)]
    if [each.envelope.body for each in got] != [b"first", b"clone"]:
        raise Refuted(f"there came {[each.envelope.body for each in got]}")
    bench.nothing(receiver)
    for each in got:
        bench.complete(receiver, each)
    return "the second message of one id was dropped, one of another id was not"


def _scheduled(bench: Bench) -> str:
    queue = bench.queue()
    began = monotonic()
    bench.send(queue, b"later", delay=4.0)
    receiver = bench.receiver(queue)
    delivery = bench.one(receiver, 4.0 + LATE)
    took = monotonic() - began
    if took < 3.0:
        raise Refuted(f"it came after {took:.1f} s, and was due after 4 s")
    bench.complete(receiver, delivery)
    return f"due after 4 s, received after {took:.1f} s"


def _dead_letters(bench: Bench) -> str:
    queue = bench.queue()
    bench.send(queue, b"x")
    receiver = bench.receiver(queue)
    delivery = bench.one(receiver)
    bench.settle(receiver, delivery, Abandon())
    again = bench.one(receiver)
    if again.delivery_count != 2:
        raise Refuted(f"the delivery count is {again.delivery_count}")
    bench.settle(receiver, again, DeadLetter("why", "because"))
    dead = bench.receiver(queue, dead_letter=True)
    found = bench.one(dead)
    if (found.dead_letter_reason, found.dead_letter_description) != ("why", "because"):
        raise Refuted(f"its reason is {found.dead_letter_reason!r}")
    bench.complete(dead, found)
    return "kept with its reason and description"


def _clock(bench: Bench) -> str:
    queue = bench.queue()
    if not isinstance(bench.broker, Inspectable):
        raise Skipped("its clock cannot be read")
    inspector = bench.broker.inspector()
    inspector.facts(queue)  # a Storage queue's answers say what time it is there
    offset = inspector.clock_offset(queue)
    if offset is None:
        raise Skipped("its clock cannot be read")
    if abs(offset) >= SKEW_SECONDS:
        raise Refuted(f"the service's clock and this machine's are {offset:+.1f} s apart")
    return f"{offset:+.1f} s from this machine's"


def _plan(bench: Bench) -> str:
    can = bench.broker.capabilities
    if not can.fixed_lease:
        raise Skipped("its queues have no lock of their own: a worker asks for its lease")
    if not isinstance(bench.broker, Inspectable):
        raise Skipped("settings cannot be read")
    inspector = bench.broker.inspector()
    all_facts = [inspector.facts(name) for name in bench.app.queue_names()]
    unread = [facts.unread for facts in all_facts if facts.unread]
    there = [facts for facts in all_facts if facts.exists and not facts.unread]
    wrong = [
        finding.text
        for facts in there
        for finding in judge(facts, bench.app.queue_plan(facts.queue), can)
        if finding.level is Level.PROBLEM and finding.check == "lease"
    ]
    if wrong:
        raise Refuted(
            f"wrong lock: {wrong[0]} ({len(wrong)} of {plural(len(there), 'queue')}); aztask azure "
            "diff names each, and the command that mends it"
        )
    if unread:
        raise Skipped(unread[0])
    if not there:
        raise Skipped("none of the app's queues exists yet")
    return f"{plural(len(there), 'queue')} of the app: the lock that its workers ask for"


def _transaction(bench: Bench) -> str:
    rows = bench.rows()
    first, second, third = (Place(NO_OWNER, "one", key) for key in "abc")
    old = rows.write(Change(first, {"number": 1}))
    new = rows.write(Change(first, {"number": 2}, old))
    if old is None or new is None:
        raise Refuted("a row could not be made and replaced")
    groups = {
        "an old tag": [Change(second, {"number": 1}), Change(first, {"number": 3}, old)],
        "a row that exists": [Change(third, {"number": 1}), Change(first, {"number": 3})],
    }
    for conflict, changes in groups.items():
        if rows.together(changes) is not None:
            raise Refuted(f"a group with {conflict} was carried out")
        found = [None if row is None else row.values["number"] for row in _three(rows)]
        if found != [2, None, None]:
            raise Refuted(f"a group with {conflict} was refused and left {found}")
    if rows.together([Change(second, {"number": 1}), Change(first, {"number": 3}, new)]) is None:
        raise Refuted("a group without a conflict was refused")
    found = [None if row is None else row.values["number"] for row in _three(rows)]
    if found != [3, 1, None]:
        raise Refuted(f"a group was carried out and left {found}")
    return "a conflict changed no row of its group, and a group without one changed all"


def _tags(bench: Bench) -> str:
    rows = bench.rows()
    place = Place(NO_OWNER, "one", "a")
    old = rows.write(Change(place, {"number": 1}))
    if old is None or rows.write(Change(place, {"number": 2})) is not None:
        raise Refuted("a row was made twice")
    new = rows.write(Change(place, {"number": 2}, old))
    if new is None or new.tag == old.tag:
        raise Refuted("replacing a row did not give it another tag")
    if rows.write(Change(place, {"number": 3}, old)) is not None:
        raise Refuted("a row was replaced under an old tag")
    if rows.write(Change(place, None, old)) is not None:
        raise Refuted("a row was deleted under an old tag")
    (found,) = rows.get([place])
    if found is None or (found.values["number"], found.tag) != (2, new.tag):
        raise Refuted("a write under an old tag was refused and changed the row")
    if rows.write(Change(place, None, new)) is None or rows.get([place]) != [None]:
        raise Refuted("the current tag did not delete the row")
    return "an old tag replaced and deleted nothing, the current one did"


def _three(rows: Rows) -> list[Row | None]:
    return rows.get([Place(NO_OWNER, "one", key) for key in "abc"])


def _event_file(bench: Bench) -> str:
    container, address = bench.container()
    events = late_module("stores.events.blobs", "blob").EventBlobs(address)
    try:
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder, "events.jsonl")
            path.write_bytes(b"1\n")
            first, again = events.upload(path.name, path), events.upload(path.name, path)
            path.write_bytes(b"1\n2\n")
            other = events.upload(path.name, path)
    finally:
        events.close()
    if (first, again, other) != (True, True, False):
        raise Refuted(f"the uploads were answered with {first}, {again}, {other}")
    if (found := container.read("events.jsonl")) != b"1\n":
        raise Refuted(f"a second upload changed the blob: {found!r}")
    return "a file was stored once, and a second upload changed nothing"


def _append(bench: Bench) -> str:
    container, _ = bench.container()
    for line, at, wanted in ((b"1\n", 0, True), (b"2\n", 2, True), (b"x\n", 2, False)):
        if container.append("events.jsonl", line, at) is not wanted:
            raise Refuted(f"appending at byte {at} was {'refused' if wanted else 'carried out'}")
    if (found := container.read("events.jsonl")) != b"1\n2\n":
        raise Refuted(f"the blob has {found!r}")
    return "in order, and refused to a writer that did not know the blob's length"


CHECKS: Final[Mapping[str, tuple[str, Callable[[Bench], str]]]] = {
    "queue": ("5", _queue),
    "lock": ("1", _lock),
    "renewal": ("15", _renewal),
    "lapse": ("14", _lapse),
    "sessions": ("order within a session", _sessions),
    "deferral": ("10", _deferral),
    "duplicates": ("16", _duplicates),
    "scheduled": ("11", _scheduled),
    "dead-letters": ("12", _dead_letters),
    "clock": ("11", _clock),
    "plan": ("27", _plan),
    "transaction": ("37", _transaction),
    "tags": ("38", _tags),
    "event-file": ("events say what happened", _event_file),
    "append": ("events say what happened", _append),
    "throughput": ("nothing accepted is lost", throughput),
    "latency": ("1", latency),
    **{f"role-{name}": ("49", role_check(name)) for name in VARIABLES},
    **{f"stores-{name}": ("49", store_check(name)) for name in VARIABLES},
}
"""{check: (a rule of docs/rules.md by its number, or a promise of its last table; what runs)}"""

NOT_COVERED: Final = (
    "a throttled service, idle links and what happens in seven days, which --long tries",
)

BY_HAND: Final = "by hand"

UNTRIED: Final[Mapping[str, tuple[tuple[str, str], ...]]] = {
    "discussions/which-queue.md": (("facts of the services", "throughput, latency, clock"),),
    "emulator.md": (("the Dockerfile", BY_HAND),),
    "how-to/advanced/functions-and-events.md": (
        ("Event Grid, and the host of Azure Functions", BY_HAND),
    ),
    "how-to/advanced/send-from-other-languages.md": (("the clients in .NET and Go", BY_HAND),),
    "how-to/production/application-insights.md": (("the queries", BY_HAND),),
    "how-to/production/dashboard.md": (("a login with the real Entra ID", BY_HAND),),
    "how-to/production/deploy.md": (
        ("the roles", "role-sender, role-worker, role-operator, role-scaler"),
        ("the manifests for Kubernetes and KEDA", BY_HAND),
        ("the worker on Container Apps", BY_HAND),
    ),
    "how-to/production/keep-results-in-tables.md": (
        ("the roles on tables and blobs", "stores-sender, stores-worker, stores-operator"),
    ),
    "how-to/production/make-the-resources.md": (
        ("the files of aztask azure init", BY_HAND),
        ("deployments, expressions, ids of roles, scale rules", BY_HAND),
    ),
    "how-to/spark/events.md": (("other file systems than file and viewfs", BY_HAND),),
    "how-to/spark/orchestrate.md": (("the job for Databricks", BY_HAND),),
    "how-to/spark/run-on-a-cluster.md": (
        ("sections that are marked", BY_HAND),
        ("Spark before 4.3", BY_HAND),
        ("Databricks", BY_HAND),
        ("Azure Synapse", BY_HAND),
        ("Microsoft Fabric", BY_HAND),
    ),
    "how-to/spark/tables.md": (("Spark's format delta", BY_HAND),),
    "platforms.md": (("real machines with macOS and Windows", BY_HAND),),
    "reference/cli.md": (("the files of aztask azure init", BY_HAND),),
    "reference/versions.md": (
        ("PyPy, and builds without the global lock", BY_HAND),
        ("real machines with macOS and Windows", BY_HAND),
    ),
}
"""{page of docs/: what is marked "not tried" there, in order, and the checks that try it}"""


def verify(app: App, names: Sequence[str] = (), *, run: str = "") -> Iterator[Proof]:
    """Run the checks, each with its queues, and yield each result at once.

    * `names`: of checks; empty for all.
    * `run`: the id of the run, in the names of what it makes; a new one by default.

    If the process dies, `aztask.operate.verifybench.leftovers` finds what it made.

    Raises BrokerUnavailable if nothing answers.
    """
    require_service(app)
    run = run or uuid.uuid4().hex[:8]
    for name in names or CHECKS:
        rule, check = CHECKS[name]
        yield attempt(name, rule, check, Bench(app, run, name))


def require_service(app: App) -> None:
    """Raise ConfigurationError for an app without a service, or with several."""
    refuse_several(app, "aztask azure verify")
    if not app.broker.capabilities.remote:
        raise ConfigurationError(
            f"{app.address} is no service: name a namespace or an account in AZTASK_BROKER"
        )


def attempt(
    name: str, rule: str, check: Callable[[Bench], str], bench: Bench, *, keep: bool = False
) -> Proof:
    """Run one check, and delete what it has made unless `keep` is set."""
    began = monotonic()
    state: State = "failed"
    try:
        text, state = check(bench), "passed"
    except Skipped as why:
        text, state = str(why), "skipped"
    except (Refuted, AztaskError) as why:
        text, bench.outage = str(why), isinstance(why, BrokerUnavailable)
    except Exception as why:  # noqa: BLE001  # an SDK may raise anything; the others go on
        text = reason_of(why)
    left = bench.close(keep=keep)
    return Proof(name, rule, state, mask(text + left), round(monotonic() - began, 2))


# -- the report ------------------------------------------------------------------------------------


def report(app: App, proofs: Sequence[Proof]) -> dict[str, Any]:
    """The report as JSON (rule 4)."""
    return {
        "at": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "service": app.broker.capabilities.name,
        "versions": versions(),
        "proofs": [asdict(each) for each in proofs],
        "not covered": list(
            dict.fromkeys(
                (
                    *NOT_COVERED,
                    *(what for marks in UNTRIED.values() for what, by in marks if by == BY_HAND),
                )
            )
        ),
    }


def as_html(found: Mapping[str, Any]) -> str:
    """The report as a page."""

    def cells(each: Mapping[str, Any]) -> str:
        return "".join(f"<td>{html.escape(str(value))}</td>" for value in each.values())

    rows = [f"<tr>{cells(each)}</tr>" for each in found["proofs"]]
    about = html.escape(f"{found['service']}, {found['at']}, aztask {found['versions']['aztask']}")
    missing = "".join(f"<li>{html.escape(each)}</li>" for each in found["not covered"])
    head = "".join(f"<th>{each}</th>" for each in ("check", "rule", "state", "seen", "seconds"))
    return (
        '<!doctype html>\n<html lang="en"><meta charset="utf-8">\n'
        "<title>aztask azure verify</title>\n"
        f"<h1>aztask azure verify</h1>\n<p>{about}</p>\n<table border>\n<tr>{head}</tr>\n"
        + "\n".join(rows)
        + f"\n</table>\n<p>Not covered:</p>\n<ul>{missing}</ul>\n</html>\n"
    )
