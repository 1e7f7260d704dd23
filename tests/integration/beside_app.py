"""What a Celery application sees of its tasks and results: one script, for each broker and backend.

``python -m beside_app`` prints a map of what it saw. The address comes from the environment.
"""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from typing import Any

from celery import Celery, Task, chain, chord, group, signals
from celery.exceptions import Ignore, Reject, SoftTimeLimitExceeded
from celery.result import AsyncResult, GroupResult, allow_join_result
from celery.schedules import crontab

app = Celery("beside_app", broker=os.environ["BROKER_URL"], backend=os.environ["BACKEND_URL"])
app.conf.update(
    broker_transport_options=json.loads(os.environ["OPTIONS"]),
    result_backend_transport_options=json.loads(os.environ["RESULT_OPTIONS"]),
    task_default_queue=os.environ["QUEUE"],
    task_acks_late=True,
    task_track_started=True,
    result_extended=True,
    result_expires=3600,
    worker_prefetch_multiplier=4,
    broker_connection_retry_on_startup=True,
    include=["beside_app"],
    task_routes={"routed": {"queue": f"{os.environ['QUEUE']}-routed"}},
    accept_content=["json", "pickle"],
)
SECONDS = 60.0
MAIN = f"main@{socket.gethostname()}"
SMALL = f"{os.environ['QUEUE']}-small"  # served by a worker that replaces its processes
MEMORY = f"{os.environ['QUEUE']}-memory"  # by one that replaces those of more than 200 MB
app.conf.beat_schedule = {
    "tick": {"task": "tick", "schedule": 1.0, "options": {"expires": 600}, "args": ["interval"]},
    "minute": {"task": "tick", "schedule": crontab(), "args": ["crontab"]},
}


def note(line: str) -> None:
    with Path(os.environ["NOTES"]).open("a") as file:
        file.write(line + "\n")


def notes(word: str) -> list[str]:
    file = Path(os.environ["NOTES"])
    lines = file.read_text().splitlines() if file.exists() else []
    return [line for line in lines if line.partition(" ")[0] == word]


@app.task(name="add")
def add(left: int, right: int = 0) -> int:
    return left + right


@app.task(name="total")
def total(values: list[int]) -> int:
    return sum(values)


@app.task(name="slow")
def slow(seconds: float) -> str:
    time.sleep(seconds)
    return "slept"


@app.task(name="bad")
def bad() -> None:
    raise ValueError("bad")


@app.task(name="failed")
def failed(*_: Any) -> str:
    with Path(os.environ["ERRBACKS"]).open("a") as file:
        file.write("called\n")
    return "noted"


class Noted(Task):  # type: ignore[misc]
    def before_start(self, task_id: str, *_: Any) -> None:
        note(f"{task_id} before_start")

    def on_success(self, _: Any, task_id: str, *__: Any) -> None:
        note(f"{task_id} on_success")

    def after_return(self, _: Any, __: Any, task_id: str, *___: Any) -> None:
        note(f"{task_id} after_return")


@app.task(name="noted", base=Noted)
def noted() -> None:
    pass


@signals.task_prerun.connect
@signals.task_success.connect
@signals.task_postrun.connect
def signalled(sender: Any = None, task_id: str = "", signal: Any = None, **_: Any) -> None:
    if sender is not None and sender.name == "routed":
        note(f"signals {signal.name.removeprefix('task_')}")


@app.task(name="routed", bind=True)
def routed(self: Any) -> str:
    return str(self.request.delivery_info["routing_key"])


@app.task(
    name="backing_off", bind=True, autoretry_for=(OSError,), retry_backoff=1, retry_jitter=False
)
def backing_off(self: Any) -> int:
    note(f"{self.request.id} {time.time()}")
    if self.request.retries < 2:
        raise OSError
    return int(self.request.retries)


@app.task(name="retrying", bind=True)
def retrying(self: Any) -> int:
    if self.request.retries < 2:
        raise self.retry(countdown=0.5, max_retries=3)
    return int(self.request.retries)


@app.task(name="early", acks_late=False)
def early() -> str:
    return "ran"


@app.task(name="rejecting", bind=True)
def rejecting(self: Any, requeue: bool) -> str:
    note(f"{self.request.id} ran")
    if len(notes(self.request.id)) < 2:
        raise Reject("not now", requeue=requeue)
    return "ran again"


@app.task(name="limited", soft_time_limit=2, time_limit=30)
def limited() -> str:
    try:
        time.sleep(20)
    except SoftTimeLimitExceeded:
        return "SoftTimeLimitExceeded"
    return "slept"


@app.task(name="pid")
def pid() -> int:
    return os.getpid()


@app.task(name="memory")
def memory(megabytes: int) -> int:
    return os.getpid() if len(b"x" * (megabytes * 2**20)) else 0


@app.task(name="tick")
def tick(kind: str) -> None:
    note(f"{kind} {time.time()}")


@app.task(name="killed", bind=True, reject_on_worker_lost=True)
def killed(self: Any) -> str:
    note(f"{self.request.id} ran")
    if len(notes(self.request.id)) < 2:
        os.kill(os.getpid(), signal.SIGKILL)
    return "ran again"


@app.task(name="progressing", bind=True)
def progressing(self: Any) -> None:
    self.update_state(state="PROGRESS", meta={"done": 3})
    time.sleep(4)
    raise Ignore


@app.task(name="rated", rate_limit="2/s")
def rated() -> float:
    return time.time()


@app.task(name="replaced", bind=True)
def replaced(self: Any) -> None:
    raise self.replace(add.s(20, 22))


@app.task(name="kind")
def kind(value: Any) -> str:
    return type(value).__name__


@app.task(name="grow", bind=True)
def grow(self: Any) -> int:
    self.add_to_chord(add.si(10, 20))
    return 1


@app.task(name="parent")
def parent() -> str:
    add.delay(1, 2)
    add.delay(3, 4)
    return "parent"


FACTS: dict[str, Callable[[], str]] = {}


def fact(name: str) -> Callable[[Callable[[], str]], Callable[[], str]]:
    def kept(function: Callable[[], str]) -> Callable[[], str]:
        FACTS[name] = function
        return function

    return kept


def asked(method: str, *arguments: Any) -> Any:
    inspect = app.control.inspect([MAIN], timeout=10.0, limit=1)
    return (getattr(inspect, method)(*arguments) or {}).get(MAIN)


def until(check: Callable[[], Any], seconds: float = SECONDS) -> Any:
    ends = time.monotonic() + seconds
    while not (found := check()) and time.monotonic() < ends:
        time.sleep(0.2)
    return found


def plain(error: BaseException) -> str:
    text = re.sub(r"[0-9a-f]{8}-[0-9a-f-]{27}", "ID", str(error))
    return f"{type(error).__name__}: {text}"


@fact("`revoke` while no worker runs")
def revoked_before() -> str:
    """Called twice: before there is a worker, and when there is one."""
    kept = AsyncResult("revoked-before", app=app)
    until(kept.ready)
    return {"SUCCESS": "lost: the task runs", "REVOKED": "holds"}[kept.state]


@fact("`revoke` of a task that waits for its `countdown`")
def revoked_waiting() -> str:
    sent = add.apply_async((1, 2), countdown=20)
    time.sleep(2)
    sent.revoke()
    until(sent.ready)
    return "holds" if sent.state == "REVOKED" else sent.state


@fact("`revoke(terminate=True)` of a running task")
def terminated() -> str:
    sent = slow.delay(30)
    until(lambda: sent.state == "STARTED")
    sent.revoke(terminate=True)
    until(sent.ready, 20)
    return "ends it" if sent.state == "REVOKED" else sent.state


@fact("`inspect scheduled`, a task with `countdown=300`")
def scheduled() -> str:
    sent = add.apply_async((1, 2), countdown=300)
    time.sleep(3)
    found = [each for each in asked("scheduled") or () if each["request"]["id"] == sent.id]
    sent.revoke()
    return "shown, with its `eta`" if found and found[0]["eta"] else "not shown"


@fact("`inspect active`, a running task")
def active() -> str:
    sent = slow.delay(8)
    until(lambda: sent.state == "STARTED")
    found = [each for each in asked("active") or () if each["id"] == sent.id]
    began = found and abs(found[0]["time_start"] - time.time()) < 60
    sent.get(timeout=SECONDS)
    return "shown, with its start" if began else "shown" if found else "not shown"


@fact("`inspect reserved`, a task that a worker holds")
def reserved() -> str:
    sent = [slow.delay(6) for _ in range(3)]
    time.sleep(3)
    ids = {each.id for each in sent}
    found = [each for each in asked("reserved") or () if each["id"] in ids]
    for each in sent:
        each.get(timeout=SECONDS)
    return "shown" if len(found) == 1 else f"{len(found)} shown"


@fact("`inspect query_task` of a running task")
def queried() -> str:
    sent = slow.delay(6)
    until(lambda: sent.state == "STARTED")
    state, _ = (asked("query_task", [sent.id]) or {}).get(sent.id, ("not shown", None))
    sent.get(timeout=SECONDS)
    return str(state)


@fact("`inspect query_task` of a task with `countdown=300`")
def queried_waiting() -> str:
    sent = add.apply_async((1, 2), countdown=300)
    time.sleep(3)
    state, _ = (asked("query_task", [sent.id]) or {}).get(sent.id, ("not shown", None))
    sent.revoke()
    return str(state)


@fact("`task_track_started`")
def started() -> str:
    sent = slow.delay(3)
    until(lambda: sent.state != "PENDING")
    state, known = sent.state, sorted(sent.info or ())
    sent.get(timeout=SECONDS)
    return f"{state}, with {' and '.join(known)}"


@fact("`self.request.eta` of a task with `countdown`")
def eta() -> str:
    sent = app.send_task("eta", countdown=2)
    return str(sent.get(timeout=SECONDS))


@app.task(name="eta", bind=True)
def own_eta(self: Any) -> str:
    return "set" if self.request.eta else "`None`"


@fact("`result_extended`")
def extended() -> str:
    sent = add.apply_async((1,), {"right": 2})
    sent.get(timeout=SECONDS)
    names = ("name", "args", "kwargs", "worker", "retries", "queue")
    return ", ".join(name for name in names if getattr(sent, name) is not None)


@fact("`AsyncResult.children`")
def children() -> str:
    sent = parent.delay()
    sent.get(timeout=SECONDS)
    return f"{len(sent.children or ())} of 2"


@fact("`AsyncResult.parent` and `.graph` of a chain")
def graph() -> str:
    sent = chain(add.s(1, 2), add.s(3), add.s(4)).delay()
    sent.get(timeout=SECONDS)
    parents = bool(sent.parent and sent.parent.parent)
    return f"{'kept' if parents else 'lost'}, {len(sent.parent.parent.graph)} nodes"


@fact("`AsyncResult.forget`")
def forgotten() -> str:
    sent = add.delay(1, 2)
    sent.get(timeout=SECONDS)
    sent.forget()
    return AsyncResult(sent.id, app=app).state


@fact("`GroupResult.save`, `restore`, `delete`")
def saved() -> str:
    sent = group(add.s(n, n) for n in range(3)).delay()
    sent.save()
    found = GroupResult.restore(sent.id, app=app)
    values = found.join(timeout=SECONDS)
    found.delete()
    gone = GroupResult.restore(sent.id, app=app) is None
    return f"{values}, {'deleted' if gone else 'kept'}"


@fact("`self.add_to_chord`")
def grown() -> str:
    sent = chord([grow.s(), add.s(2, 2)], total.s()).delay()
    return f"the body gets the sum {sent.get(timeout=SECONDS)}"


@fact("chord with an empty header")
def empty() -> str:
    return f"the body gets the sum {chord([], total.s()).delay().get(timeout=SECONDS)}"


def of_chord(signature: Any) -> tuple[str, str, str]:
    """(the end of the body, the states of its members, how often errbacks were called)."""
    errbacks = Path(os.environ["ERRBACKS"])
    errbacks.write_text("")
    sent = signature.delay()
    until(sent.ready)
    text = plain(sent.result) if isinstance(sent.result, Exception) else str(sent.result)
    time.sleep(3)
    members = sent.parent.results if sent.parent is not None else ()
    states = ", ".join(each.state for each in members)
    calls = len(errbacks.read_text().splitlines())
    return text, states, "called once" if calls == 1 else f"called {calls} times"


@fact("chord, a member fails: its body")
def chord_error() -> str:
    text, states, _ = of_chord(chord([add.s(1, 1), bad.s()], total.s()))
    return f"{text} ({states})"


@fact("chord, a member fails: errback of the body")
def chord_errback() -> str:
    _, _, calls = of_chord(chord([add.s(1, 1), bad.s()], total.s().on_error(failed.s())))
    return calls


@fact("chord, two members fail: errback of the chord")
def chord_errbacks() -> str:
    signature = chord([bad.s(), bad.s()], total.s())
    signature.link_error(failed.s())
    text, _, calls = of_chord(signature)
    return f"{text}, errback {calls}"


@fact("chord whose body fails")
def body_fails() -> str:
    text, _, calls = of_chord(chord([add.s(1, 1)], bad.si().on_error(failed.s())))
    return f"{text}, errback {calls}"


@fact("chord in a chord, an inner member fails")
def nested() -> str:
    inner = chord([bad.s(), add.s(1, 1)], total.s())
    sent = chord([inner, add.s(2, 2)], total.s()).delay()
    body = sent.parent.results[0]
    until(body.ready)
    until(sent.ready, 8)
    states = ", ".join(each.state for each in body.parent.results)
    return f"inner body {plain(body.result)} ({states}); outer body {sent.state}"


@fact("`group.get` with a failed member")
def group_error() -> str:
    sent = group(add.s(1, 1), bad.s()).delay()
    try:
        return str(sent.get(timeout=SECONDS))
    except ValueError as error:
        return plain(error)


@fact("result after `result_expires`")
def expired() -> str:
    with allow_join_result():
        backend = app._get_backend()
        backend.expires = 2
        backend.store_result("expiring", 1, "SUCCESS")
    time.sleep(5)
    if AsyncResult("expiring", app=app).state == "PENDING":
        return "gone by itself"
    backend.cleanup()
    kept = AsyncResult("expiring", app=app).state != "PENDING"
    return "kept" if kept else "gone with `backend_cleanup`"


@fact("`task_routes`, and `task_prerun`, `task_success`, `task_postrun`")
def routes() -> str:
    queue = routed.delay().get(timeout=SECONDS)
    until(lambda: len(notes("signals")) >= 3)
    names = ", ".join(line.split()[1] for line in notes("signals"))
    return f"runs in the queue {queue.rpartition('-')[2]}: {names}"


@fact("`autoretry_for` with `retry_backoff`")
def backed_off() -> str:
    sent = backing_off.delay()
    retries = sent.get(timeout=SECONDS)
    times = [float(line.split()[1]) for line in notes(sent.id)]
    waits = [second - first for first, second in pairwise(times)]
    grows = all(wait >= wanted for wait, wanted in zip(waits, (1.0, 2.0), strict=True))
    return f"{retries} retries, {'each waits longer' if grows else waits}"


@fact("`self.retry(countdown=...)`")
def retried() -> str:
    return f"{retrying.delay().get(timeout=SECONDS)} retries"


@fact("`acks_late=False`")
def acknowledged_early() -> str:
    return str(early.delay().get(timeout=SECONDS))


@fact("`Reject(requeue=True)`")
def requeued() -> str:
    return str(rejecting.delay(True).get(timeout=SECONDS))


@fact("`Reject(requeue=False)`")
def rejected() -> str:
    sent = rejecting.delay(False)
    until(lambda: notes(sent.id))
    time.sleep(3)
    return f"ran {len(notes(sent.id))} time, {sent.state}"


@fact("`link` and `link_error` of a task")
def linked() -> str:
    Path(os.environ["ERRBACKS"]).write_text("")
    add.apply_async((1, 1), link=noted.si().set(task_id="linked"))
    bad.apply_async(link_error=failed.s())
    until(lambda: notes("linked") and Path(os.environ["ERRBACKS"]).read_text())
    calls = len(Path(os.environ["ERRBACKS"]).read_text().splitlines())
    return f"{'called' if notes('linked') else 'not called'}, errback called {calls} time"


@fact("`map`, `starmap`, `chunks`")
def many() -> str:
    mapped = add.map([1, 2]).delay().get(timeout=SECONDS)
    starred = add.starmap([(1, 2), (3, 4)]).delay().get(timeout=SECONDS)
    chunked = add.chunks([(n, n) for n in range(4)], 2).delay().get(timeout=SECONDS)
    return f"{mapped}, {starred}, {chunked}"


@fact("chord in a chord, and a chain with a group in it")
def deep() -> str:
    inner = chord([add.s(1, 1), add.s(2, 2)], total.s())
    outer = chord([inner, add.s(3, 3)], total.s()).delay().get(timeout=SECONDS)
    steps = chain(add.s(1, 1), group(add.s(1), add.s(2)), total.s(), add.s(1))
    return f"{outer}, {steps.delay().get(timeout=SECONDS)}"


@fact("`self.replace`")
def with_another() -> str:
    return str(replaced.delay().get(timeout=SECONDS))


@fact("`soft_time_limit`")
def soft() -> str:
    return str(limited.delay().get(timeout=SECONDS))


@fact("`time_limit`")
def hard() -> str:
    sent = slow.apply_async((60,), time_limit=2)
    until(sent.ready)
    return plain(sent.result) if sent.state == "FAILURE" else str(sent.state)


@fact("`rate_limit` of two a second, for six tasks")
def rates() -> str:
    times = [each.get(timeout=SECONDS) for each in [rated.delay() for _ in range(6)]]
    return "kept" if max(times) - min(times) > 1.5 else f"{max(times) - min(times):.1f} s"


@fact("`expires`")
def expiring() -> str:
    sent = add.apply_async((1, 1), countdown=3, expires=1)
    until(sent.ready, 20)
    return str(sent.state)


@fact("a task with an `eta` in an hour")
def in_an_hour() -> str:
    sent = add.apply_async((1, 1), countdown=3600)
    time.sleep(3)
    state = sent.state
    sent.revoke()
    return {"PENDING": "waits", "RECEIVED": "waits"}.get(state, state)


@fact("methods of a custom `Task` class")
def custom() -> str:
    sent = noted.delay()
    until(lambda: len(notes(sent.id)) == 3)
    return ", ".join(line.split()[1] for line in notes(sent.id))


@fact('`serializer="pickle"` by choice, `compression="gzip"`')
def pickled() -> str:
    sent = kind.apply_async(((1, 2),), serializer="pickle", compression="gzip")
    return f"the task gets a {sent.get(timeout=SECONDS)}"


@fact("`apply`, and `task_always_eager`")
def eager() -> str:
    values = [add.apply((1, 2)).get()]
    app.conf.task_always_eager = True
    try:
        values.append(add.delay(3, 4).get(disable_sync_subtasks=False))
    finally:
        app.conf.task_always_eager = False
    return str(values)


@fact("`--max-tasks-per-child 1`")
def children_replaced() -> str:
    sent = [pid.apply_async(queue=SMALL) for _ in range(3)]
    return f"{len({each.get(timeout=SECONDS) for each in sent})} processes for 3 tasks"


@fact("`--max-memory-per-child`")
def memory_bounded() -> str:
    pids = [
        memory.apply_async((size,), queue=MEMORY).get(timeout=SECONDS) for size in (1, 1, 300, 1)
    ]
    kept = pids[0] == pids[1] == pids[2]
    replaced = pids[3] != pids[2]
    return (
        f"a process is {'kept' if kept else 'not kept'} below it"
        f" and {'replaced' if replaced else 'not replaced'} above it"
    )


@fact("`reject_on_worker_lost`, its process is killed")
def worker_lost() -> str:
    return str(killed.delay().get(timeout=SECONDS))


@fact("`update_state`, then `Ignore`")
def ignored() -> str:
    sent = progressing.delay()
    until(lambda: sent.state == "PROGRESS")
    done = (sent.info or {}).get("done")
    time.sleep(6)
    return f"PROGRESS with {done}, and it stays {sent.state}"


@contextmanager
def beats(*schedulers: str) -> Iterator[None]:
    """A process of beat for each of these scheduler classes."""
    command = [sys.executable, "-m", "celery", "-A", "beside_app", "beat", "--pidfile="]
    running = [
        subprocess.Popen([*command, "-S", name, "-s", f"beat-{number}"])
        for number, name in enumerate(schedulers)
    ]
    try:
        yield
    finally:
        for each in running:
            each.terminate()
        for each in running:
            each.wait(20)


def ticks(kind: str) -> list[float]:
    return sorted(float(line.split()[1]) for line in notes(kind))


@fact("`celery beat`: an interval and a `crontab`")
def beaten() -> str:
    with beats("celery.beat:PersistentScheduler"):
        until(lambda: len(ticks("interval")) > 4 and ticks("crontab"), 90)
    sent = [kind for kind in ("interval", "crontab") if ticks(kind)]
    return f"{' and '.join(sent)} sent"


@fact("two beats, an entry for each second")
def beaten_twice() -> str:
    time.sleep(3)  # what the beat before has sent has run by then
    earlier = len(ticks("interval"))
    with beats(os.environ["BEAT"], os.environ["BEAT"]):
        until(lambda: len(ticks("interval")) > earlier + 5)
        earlier = len(ticks("interval"))
        time.sleep(20)
        count = len(ticks("interval")) - earlier
    return f"each time sent {'once' if count < 30 else 'twice'}"


def site(fact: str) -> str:
    """What a Django application sees: `beside_site`."""
    words = [sys.executable, "-m", "beside_site", fact]
    return subprocess.run(words, check=True, stdout=subprocess.PIPE, text=True).stdout.strip()


@fact("Django: settings `CELERY_...`, `shared_task`, `autodiscover_tasks`")
def django_runs() -> str:
    return site("runs")


@fact("Django: `delay_on_commit`")
def django_commits() -> str:
    return site("commit")


@fact("Django: a row of django_celery_beat, with `DatabaseScheduler`")
def django_beats() -> str:
    return site("beat")


@fact("`control`: `pool_grow`, `rate_limit`, `time_limit`, `cancel_consumer`, `add_consumer`")
def controlled() -> str:
    queue = f"{os.environ['QUEUE']}-more"
    calls = [
        ("pool_grow", {"n": 1}),
        ("rate_limit", {"task_name": "rated", "rate_limit": "3/s"}),
        ("time_limit", {"task_name": "slow", "soft": 60, "hard": 90}),
        ("add_consumer", {"queue": queue}),
        ("cancel_consumer", {"queue": queue}),
        ("add_consumer", {"queue": queue}),
    ]
    for command, arguments in calls:
        (answer,) = app.control.broadcast(
            command, arguments=arguments, destination=[MAIN], reply=True, timeout=10.0
        )
        if "ok" not in answer[MAIN]:
            return f"{command}: {answer}"
    value = add.apply_async((1, 1), queue=queue).get(timeout=SECONDS)
    return f"done, and a task in the new queue gives {value}"


@fact("events of a task")
def events() -> str:
    app.control.enable_events()
    kinds: list[str] = []
    ready = threading.Event()
    task_id = str(uuid.uuid4())  # before it is sent: its first event may be there before its result

    def on_event(event: dict[str, Any]) -> None:
        if event.get("uuid") == task_id:
            kinds.append(event["type"])

    def listen() -> None:
        with app.connection_for_read() as connection:
            receiver = app.events.Receiver(connection, handlers={"*": on_event})
            ready.set()
            receiver.capture(limit=None, timeout=None, wakeup=True)

    threading.Thread(target=listen, daemon=True).start()
    ready.wait(10)
    time.sleep(12)  # a worker on Storage queues may take so long to notice who listens
    add.apply_async((1, 2), task_id=task_id).get(timeout=SECONDS)
    until(lambda: "task-succeeded" in kinds, 20)
    return ", ".join(each.removeprefix("task-") for each in kinds)


def main() -> None:
    """Print what each fact is, as JSON."""
    found = {}
    for name, function in FACTS.items():
        try:
            found[name] = function()
        except Exception as error:  # noqa: BLE001  # it is what the table shows
            found[name] = plain(error)
        print(name, "=", found[name], flush=True)
    Path(os.environ["FOUND"]).write_text(json.dumps(found))


if __name__ == "__main__":
    import beside_app

    beside_app.main()
