"""Proofs that take minutes or days, and go on where they were after a kill or a reboot.

Rules
1. A file keeps the run's id and what each proof has found. A call with the same file goes on;
   a proof that has ended is not run again.
2. The file is written before a queue is made, so that its name is known whatever happens.
3. A proof of days does not wait: it prepares its queue, and a later run looks at it.
4. The file has no address, key or name but those that the run made.
"""

from __future__ import annotations

import json
import time
import uuid
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import asdict
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any, Final, NamedTuple, TypeVar

from aztask.app import App
from aztask.errors import AztaskError, BrokerUnavailable, ConfigurationError
from aztask.operate.verify import Proof, attempt, require_service
from aztask.operate.verifybench import Bench, Refuted
from aztask.operate.verifyload import throttling
from aztask.support.clock import monotonic, sleep, wall

Answer = TypeVar("Answer")

IDLE: Final = 660.0
"""Seconds without traffic: the service closes links that are idle for ten minutes."""
PAUSE: Final = 0.2
PATIENCE: Final = 30.0
"""Seconds within which both links must work again."""
DAY: Final = 86_400.0
WEEK: Final = 7 * DAY
"""The longest delay and the default life of a Storage queue's message, and the longest window of
Service Bus for duplicates."""
EARLY: Final = 600.0
"""Seconds before the end of the week at which the delayed message is due."""
AFTER: Final = 120.0
"""Seconds after the week, until the service has noticed."""


def _idle(bench: Bench) -> str:
    queue = bench.queue()
    receiver = bench.receiver(queue)
    bench.send(queue, b"before")
    bench.complete(receiver, bench.one(receiver))
    sleep(IDLE)
    began = monotonic()
    detached = _again(partial(bench.send, queue, b"after", message_id="after"))[1]
    sent = monotonic() - began
    delivery, times = _again(partial(bench.one, receiver))
    if delivery.envelope.body != b"after" or delivery.delivery_count != 1:
        raise Refuted(f"there came {delivery.envelope.body!r}, for time {delivery.delivery_count}")
    bench.complete(receiver, delivery)
    bench.nothing(receiver)
    return (
        f"after {IDLE / 60:g} min without traffic a send took {sent:.1f} s, and the receiver "
        f"had the message after {monotonic() - began:.1f} s; the service had closed "
        f"{detached + times} of the two links"
    )


def _again(call: Callable[[], Answer]) -> tuple[Answer, int]:
    """What the call returns, as soon as it is not told that its link was closed; and how often."""
    until = monotonic() + PATIENCE
    for times in count():
        try:
            return call(), times
        except BrokerUnavailable:
            if monotonic() > until:
                raise
            sleep(PAUSE)
    raise AssertionError("it counts without end")


def _begin_week(bench: Bench) -> None:
    """Store a message for a week, and one that is due shortly before its end."""
    can = bench.broker.capabilities
    queue = bench.queue(**({"duplicate_window": WEEK} if can.duplicate_detection else {}))
    bench.send(queue, b"kept", message_id="kept")
    bench.send(queue, b"due", message_id="due", delay=WEEK - EARLY)


def _end_week(bench: Bench) -> str:
    queue, receiver = bench.name, bench.receiver(bench.name)
    got = {}
    for _ in range(2):
        delivery = bench.one(receiver)
        got[delivery.envelope.body] = delivery.delivery_count
        bench.complete(receiver, delivery)
    if got != {b"kept": 1, b"due": 1}:
        raise Refuted(f"after the week there came {got}")
    bench.nothing(receiver)
    more = ""
    if bench.broker.capabilities.duplicate_detection:
        bench.send(queue, b"again", message_id="kept")
        again = bench.one(receiver)
        bench.complete(receiver, again)
        more = "; a message of the same id is stored again after a window of 7 days"
    return f"a message was kept for 7 days, and one with a delay of almost 7 days came once{more}"


class LongProof(NamedTuple):
    """A proof that runs at once, or begins now and is looked at after some days.

    * `rule`: as in `aztask.operate.verify.CHECKS`.
    * `begin`: prepares the queue; None if `check` needs nothing prepared.
    """

    rule: str
    check: Callable[[Bench], str]
    begin: Callable[[Bench], None] | None = None
    seconds: float = 0.0


LONG: Final[Mapping[str, LongProof]] = {
    "seven-days": LongProof("25", _end_week, _begin_week, WEEK + AFTER),
    "throttling": LongProof("nothing accepted is lost", throttling),
    "idle": LongProof("nothing accepted is lost", _idle),
}
"""Those of days are first, so that their time begins at once."""


class RunState:
    """What the file keeps. Each change is on the disk before the next request."""

    def __init__(self, path: Path, service: str) -> None:
        """Raises ConfigurationError for a file that no run has written, or for another service."""
        self._path = path
        self._kept: dict[str, Any] = {"service": service, "run": uuid.uuid4().hex[:8]}
        self._kept |= {"begun": {}, "ended": {}}
        with suppress(FileNotFoundError):
            self._kept = _read(path)
        if self._kept["service"] != service:
            raise ConfigurationError(
                f"{path} is of a run on {self._kept['service']}, and the app is on {service}: give "
                "another file"
            )
        self._write()

    @property
    def run(self) -> str:
        """The id of the run."""
        return str(self._kept["run"])

    def ended(self, name: str) -> Proof | None:
        """What a proof has found."""
        found = self._kept["ended"].get(name)
        return None if found is None else Proof(**found)

    def begun(self, name: str) -> float | None:
        """UTC epoch seconds at which a proof's queue was ready."""
        found = self._kept["begun"].get(name)
        return None if found is None else float(found)

    def note_begun(self, name: str) -> None:
        """The queue of a proof is ready since now."""
        self._kept["begun"][name] = wall()
        self._write()

    def note_ended(self, proof: Proof) -> None:
        """A proof was found, and is not tried again."""
        self._kept["ended"][proof.check] = asdict(proof)
        self._write()

    def _write(self) -> None:
        made = self._path.with_name(f"{self._path.name}.new")
        made.write_text(json.dumps(self._kept, indent=2) + "\n", encoding="utf-8")
        made.replace(self._path)  # a kill leaves the old file or the new one, never half of one


def _read(path: Path) -> dict[str, Any]:
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
        for proof in found["ended"].values():
            Proof(**proof)
        if not isinstance(found["run"], str) or found["begun"].keys() - LONG.keys():
            raise ValueError
    except (ValueError, KeyError, TypeError, AttributeError):
        raise ConfigurationError(
            f"{path} is not what aztask azure verify --long has written: give another file"
        ) from None
    return dict(found)


def verify_long(app: App, path: Path) -> Iterator[Proof]:
    """Go on with the long proofs, and yield what each has found so far.

    * `path`: the file with the state of the run, new or of an earlier call.

    The state of a proof is ``waiting`` until its time has come: call again then. If the process
    dies, call again: a proof that was running begins anew, on a queue of the same name. So does one
    that an outage has ended.

    Raises BrokerUnavailable if nothing answers, ConfigurationError as `RunState` does.
    """
    require_service(app)
    state = RunState(path, app.broker.capabilities.name)
    for name, proof in LONG.items():
        found = state.ended(name)
        if found is None:
            found, final = _go_on(app, name, proof, state)
            if final:
                state.note_ended(found)
        yield found


def _go_on(app: App, name: str, proof: LongProof, state: RunState) -> tuple[Proof, bool]:
    """What a proof has found, and whether that is its end."""
    bench = Bench(app, state.run, name)
    bench.queues.append(bench.name)
    begun = state.begun(name)
    if begun is None:
        with suppress(AztaskError):  # of a call that was killed; usually there is none
            app.broker.delete(bench.name)
        if proof.begin is not None:
            prepared = attempt(name, proof.rule, partial(_prepared, proof.begin), bench, keep=True)
            if prepared.state != "passed":
                bench.close()
                return prepared, not bench.outage
            state.note_begun(name)
            begun = wall()
    due = (begun or 0.0) + proof.seconds
    if wall() < due:
        bench.close(keep=True)
        at = time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime(due))
        return Proof(
            name, proof.rule, "waiting", f"run the same command again after {at}", 0
        ), False
    # A week is not thrown away for an outage at its end: the queue stays for the next call.
    found = attempt(name, proof.rule, proof.check, bench, keep=proof.begin is not None)
    if proof.begin is not None and not bench.outage:
        bench.close()
    return found, not bench.outage


def _prepared(begin: Callable[[Bench], None], bench: Bench) -> str:
    begin(bench)
    return "prepared"
